"""The models that can be used: what is on this machine, what one is, and how to bring one here."""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from cluster.planner import kv_bytes_per_token
from cluster.units import format_bytes
from console.errors import UserError
from console.memory_text import memory_line, worker_memory
from console.text_format import clean
from engine.dtypes import resolve_dtype
from engine.model_ids import (
    ModelError,
    ModelSource,
    allowed_models,
    fetched_hub_models,
    read_json,
    resolve_model,
)

_SEEDED = "made from a seed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="list|get|info", required=True)
    listing = commands.add_parser(
        "list", help="every model id, and whether it is on this machine", allow_abbrev=False
    )
    listing.add_argument("--json", action="store_true", help="print one JSON document")
    get = commands.add_parser("get", help="bring a model to this machine", allow_abbrev=False)
    get.add_argument("model", metavar="ID", help="smollm2-135m, or hf:ORG/NAME of the Hugging Face Hub")
    get.add_argument("--force", action="store_true", help="fetch it again although it is here")
    info = commands.add_parser("info", help="one model's shape and sizes", allow_abbrev=False)
    info.add_argument("model", metavar="ID|DIR|FILE.gguf", help="a model id, directory or GGUF file")
    info.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.what == "list":
        return _list(as_json=args.json)
    if args.what == "info":
        return _info(args.model, as_json=args.json)
    # its libraries take half a second to import, which the other two need not wait for
    code: int = importlib.import_module("console.model_get").get(args.model, force=args.force)
    return code


def describe_model(source: ModelSource) -> dict[str, Any]:
    """Everything about a model that its configuration tells, in the dtype that this machine would compute in."""
    config = source.config
    dtype = resolve_dtype("auto")
    return {
        "model": source.model_id,
        "path": str(source.path) if source.path else None,
        "size_bytes": _size_bytes(source.path) if source.path else 0,
        "architecture": config.architecture,
        "parameters": config.num_parameters,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_model_len": config.max_model_len,
        "dtype": dtype,
        "kv_bytes_per_token": kv_bytes_per_token(config, dtype),
    }


def _list(*, as_json: bool) -> int:
    rows = [_row(model_id) for model_id in (*allowed_models(), *fetched_hub_models())]
    if as_json:
        print(json.dumps({"models": rows}, indent=2))
        return 0
    width = max(len(row["model"]) for row in rows)
    print(
        f"{'ID':{width}}  {'PARAMETERS':>10}  {'CONTEXT':>7}  {'KV/TOKEN':>9}  {'ON DISK':>9}  WHERE",
    )
    for row in rows:
        print(f"{clean(row['model']):{width}}  {clean(row['problem']) if row['problem'] else _short(row)}")
    return 0


def _row(model_id: str) -> dict[str, Any]:
    try:
        return describe_model(resolve_model(model_id)) | {"problem": ""}
    except ModelError as error:
        return {"model": model_id, "problem": str(error)}


def _short(row: dict[str, Any]) -> str:
    size = format_bytes(row["size_bytes"]) if row["path"] else "-"
    return (
        f"{row['parameters'] / 1e6:>8.1f} M  {row['max_model_len']:>7}  "
        f"{format_bytes(row['kv_bytes_per_token']):>9}  {size:>9}  {clean(row['path'] or _SEEDED)}"
    )


def _info(model: str, *, as_json: bool) -> int:
    try:
        source = resolve_model(model)
        description = describe_model(source) | {"origin": _origin(source)}
        description["memory"] = worker_memory(source.config)
    except ModelError as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps(description, indent=2))
        return 0
    origin, memory = description.pop("origin"), description.pop("memory")
    for name, value in description.items():
        print(f"{name.replace('_', ' '):20} {'-' if value is None else clean(str(value))}")
    tokens = description["max_model_len"]
    whole = tokens * description["kv_bytes_per_token"]
    print(f"{'KV of a full context':20} {format_bytes(whole)} ({tokens} tokens)")
    print(f"{'memory of a worker':20} {memory_line(memory)}")
    for name, value in origin.items():
        print(f"{'fetched ' + name.replace('_', ' '):20} {clean(str(value))}")
    return 0


def _size_bytes(path: Path) -> int:
    """A file, or all files of a model directory, which has no deep tree."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _origin(source: ModelSource) -> dict[str, Any]:
    """What the fetch noted about where the model comes from; empty for others."""
    note = source.path / "origin.json" if source.path else None
    return read_json(note) if note is not None and note.is_file() else {}
