"""A client of a running cluster for the tests: HTTP as users speak it, with the log's facts at hand."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx2

from tests.e2e.conftest import RunningCluster


class Client:
    """Blocking; ``background`` runs one completion in a thread of its own."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._http = httpx2.Client(base_url=cluster.url, timeout=60.0, trust_env=False)
        self._token_path = Path(cluster.info.token_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def get(self, path: str) -> httpx2.Response:
        return self._http.get(path)

    def post(self, path: str, body: Any) -> httpx2.Response:
        return self._http.post(path, json=body)

    def complete(self, prompt: str | list[int], **fields: Any) -> str:
        """The text of a completion; greedy and 24 tokens unless told otherwise."""
        response = self.post("/v1/completions", completion(prompt, **fields))
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def stream(self, prompt: str | list[int], **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion, [DONE] checked and left out."""
        body = {**completion(prompt, **fields), "stream": True}
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            yield json.loads(line.removeprefix("data: "))

    def background(self, prompt: str | list[int], **fields: Any) -> "Answer":
        return Answer(self, prompt, fields)

    def command(self, tagged: dict[str, Any]) -> httpx2.Response:
        """An operator command with the run's token."""
        return self._http.post("/admin/command", json=tagged, headers=self._operator())

    def admin(self, path: str) -> httpx2.Response:
        """What only the operator may read."""
        return self._http.get(path, headers=self._operator())

    def _operator(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token_path.read_text().strip()}"}


class Answer:
    """A completion that runs in a thread; ``text`` waits for it and raises what it raised."""

    def __init__(self, client: Client, prompt: str | list[int], fields: dict[str, Any]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._text = self._thread.submit(lambda: client.complete(prompt, **fields))

    def text(self) -> str:
        try:
            return self._text.result(90.0)
        finally:
            self._thread.shutdown(wait=False)


def completion(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}
