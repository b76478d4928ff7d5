import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        "transport, transport.auth, transport.messages",
        "transport.sender, transport.receiver, transport.probe",
    ],
)
def test_only_the_int8_codec_needs_torch(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'engine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
