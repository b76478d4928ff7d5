import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        "transport, transport.auth, transport.messages",
        "transport.sender, transport.receiver, transport.probe",
        "transport.int8_codec, transport.lossless_codec, transport.codec_rates",
    ],
)
def test_nothing_needs_torch(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'engine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
