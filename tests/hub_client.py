"""A process that uses the package against a hub: reads requests as lines of JSON from stdin, answers on stdout.

huggingface_hub reads HF_ENDPOINT when it is imported, so the tests of pushing and downloading need a process whose
environment they choose; and the same requests go to environments with another huggingface_hub. A request is
``{"call": name, "login": token or null, "arguments": {...}}``; the answer holds what was printed, the result, and the
error.

What is not here: any assertion.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def version() -> str:
    import huggingface_hub

    return str(huggingface_hub.__version__)


def command(arguments: list[str]) -> int:
    from pi0_fast.cli import main

    return main(arguments)


def load(source: str, **named: Any) -> dict[str, Any]:
    """Load a tokenizer; gives what shows that it is the right one."""
    from pi0_fast import FastTokenizer

    tokenizer = FastTokenizer.from_pretrained(source, **named)
    return {"fingerprint": tokenizer.fingerprint, "metadata": tokenizer.metadata}


def push(source: str, repo_id: str, **named: Any) -> str:
    from pi0_fast import FastTokenizer

    return FastTokenizer.from_pretrained(source).push_to_hub(repo_id, **named)


def check(repo_id: str, **named: Any) -> dict[str, Any]:
    from pi0_fast import FastTokenizer

    return dict(vars(FastTokenizer.check_push_to_hub(repo_id, **named)))


def dataset(repo_id: str, **named: Any) -> dict[str, Any]:
    from pi0_fast.data import open_dataset

    reader = open_dataset(repo_id, **named)
    return {"lengths": [episode.length for episode in reader.episodes], "revision": reader.revision}


def load_policy(source: str, **named: Any) -> dict[str, Any]:
    """Load a policy; gives what shows that it is the right one."""
    from pi0_fast import PI0FastPolicy

    policy = PI0FastPolicy.from_pretrained(source, **named)
    return {
        "fingerprints": policy.checkpoint().fingerprints(),
        "names": [policy.config.text_tokenizer_name, policy.config.action_tokenizer_name],
        "weights": [float(parameter.detach().double().sum()) for parameter in policy.parameters()],
    }


def push_policy(source: str, repo_id: str, **named: Any) -> str:
    from pi0_fast import PI0FastPolicy

    return PI0FastPolicy.from_pretrained(source).push_to_hub(repo_id, **named)


def check_policy(repo_id: str, **named: Any) -> dict[str, Any]:
    from pi0_fast import PI0FastPolicy

    return dict(vars(PI0FastPolicy.check_push_to_hub(repo_id, **named)))


CALLS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (version, command, load, push, check, dataset, load_policy, push_policy, check_policy)
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from pi0_fast.types import Pi0FastError

    os.environ.pop("HF_TOKEN", None)
    if request.get("login"):
        os.environ["HF_TOKEN"] = request["login"]
    out, err = io.StringIO(), io.StringIO()
    result, error = None, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            result = CALLS[request["call"]](**request["arguments"])
        except Pi0FastError as raised:
            error = [type(raised).__name__, str(raised)]
    return {"result": result, "error": error, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    real = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints past sys.stdout must not end up between the answers
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=real, flush=True)
