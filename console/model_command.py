"""The models that can be used, and what one of them is: its shape, its size, what its KV costs."""

import argparse
import json
from typing import Any

from cluster.planner import kv_bytes_per_token
from cluster.units import format_bytes
from console.errors import UserError
from engine.dtypes import resolve_dtype
from engine.model_ids import ModelError, ModelSource, allowed_models, resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="list|info", required=True)
    listing = commands.add_parser(
        "list", help="every model id, and whether it is on this machine", allow_abbrev=False
    )
    listing.add_argument("--json", action="store_true", help="print one JSON document")
    info = commands.add_parser("info", help="one model's shape and sizes", allow_abbrev=False)
    info.add_argument("model", metavar="ID|DIR", help="a model id or a Hugging Face model directory")
    info.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    return _list(as_json=args.json) if args.what == "list" else _info(args.model, as_json=args.json)


def describe_model(source: ModelSource) -> dict[str, Any]:
    """Everything about a model that its configuration tells, in the dtype that this machine would compute in."""
    config = source.config
    dtype = resolve_dtype("auto")
    return {
        "model": source.model_id,
        "path": str(source.path) if source.path else None,
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
    rows = [_row(model_id) for model_id in allowed_models()]
    if as_json:
        print(json.dumps({"models": rows}, indent=2))
        return 0
    width = max(len(row["model"]) for row in rows)
    for row in rows:
        print(f"{row['model']:{width}}  {row['problem'] or _short(row)}")
    return 0


def _row(model_id: str) -> dict[str, Any]:
    try:
        return describe_model(resolve_model(model_id)) | {"problem": ""}
    except ModelError as error:
        return {"model": model_id, "problem": str(error)}


def _short(row: dict[str, Any]) -> str:
    return (
        f"{row['parameters'] / 1e6:7.1f} M parameters, {row['layers']:2} layers, context {row['max_model_len']}, "
        f"{format_bytes(row['kv_bytes_per_token'])} of KV per token"
    )


def _info(model: str, *, as_json: bool) -> int:
    try:
        description = describe_model(resolve_model(model))
    except ModelError as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps(description, indent=2))
        return 0
    for name, value in description.items():
        print(f"{name.replace('_', ' '):20} {'-' if value is None else value}")
    tokens = description["max_model_len"]
    whole = tokens * description["kv_bytes_per_token"]
    print(f"{'KV of a full context':20} {format_bytes(whole)} ({tokens} tokens)")
    return 0
