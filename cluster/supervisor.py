"""One run from first event to last: its directory and log, its cluster, its end. The only writer of the run's log.

start   lock, log, link, HTTP socket, token; then the cluster (``running_cluster``)
serve   until somebody asks to stop
stop    the cluster, then what is left of it counted and killed, the last event, the summary
"""

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from cluster.control import (
    AnyMessage,
    CommandDone,
    CommandSent,
    StartFailed,
    SupervisorSpec,
    SupervisorStopped,
    SupervisorUp,
)
from cluster.events import (
    Event,
    RunLogResumed,
    RunLogStalled,
    RunReady,
    RunStarted,
    RunStopped,
    RunStopping,
)
from cluster.http_listener import bind_http, url_of
from cluster.link_backend import resolve_link
from cluster.log_lines import log_line
from cluster.memory_fit import fitted
from cluster.run_dir import (
    ClockAnchor,
    RunDirError,
    RunInfo,
    RunLock,
    installed_versions,
    write_run_info,
    write_token,
)
from cluster.run_log import RunLog, RunLogError
from cluster.running_cluster import RunningCluster
from cluster.spawner import Spawner
from cluster.start_refused import StartRefused
from engine.memory import free_memory_bytes

FLUSH_S: Final = 0.05
MAX_UNWRITTEN_BYTES: Final = 32 * 2**20
"""Events that wait in memory for a full disk: an hour of an ordinary load. With more the run is stopped."""
SOURCE: Final = "supervisor"


class Supervisor:
    """``tell`` sends to the parent. ``write_summary`` makes the run's summary file once the log is closed.

    ``owns_process``: this process exists for this run alone, so whatever descends from it belongs to the run, also
    what left its process group.
    """

    def __init__(
        self,
        spec: SupervisorSpec,
        tell: Callable[[AnyMessage], None],
        write_summary: Callable[[Path], object],
        *,
        owns_process: bool = False,
        worker_spawner: Spawner,
        router_spawner: Spawner,
    ) -> None:
        self._spec = spec
        self._run_dir = Path(spec.run_dir)
        self._tell = tell
        self._write_summary = write_summary
        self._owns_process = owns_process
        self._worker_spawner = worker_spawner
        self._router_spawner = router_spawner
        self._began_at = time.monotonic()
        self._stop_reason = ""
        self._stop_asked = asyncio.Event()
        self._cluster: RunningCluster | None = None
        self._log: RunLog | None = None

    @property
    def is_stopping(self) -> bool:
        return self._stop_asked.is_set()

    def request_stop(self, reason: str) -> None:
        """End the run; the first reason counts."""
        if not self._stop_asked.is_set():
            self._stop_reason = reason
            self._stop_asked.set()

    def kill_now(self) -> None:
        """Do not wait for anybody any more."""
        self.request_stop("killed")
        if self._cluster is not None:
            self._cluster.processes.kill_all()

    def take(self, sent: CommandSent) -> None:
        """A command from the parent."""
        if self._cluster is not None:
            self._cluster.take(sent, self._tell)
        else:  # no process has been started: the parent is asking for the end or is far too early
            self.request_stop(f"{type(sent.command).__name__} before the start")
            self._tell(CommandDone(command_id=sent.command_id, ok=True, message="stopping"))

    async def run(self) -> int:
        """The whole run; returns the exit code. Nothing it started is alive when it returns."""
        with contextlib.ExitStack() as held:
            try:
                lock = RunLock.acquire(self._run_dir)
                held.callback(lock.release)
                log = RunLog(self._run_dir)
            except (RunDirError, OSError) as error:
                return self._refuse(StartRefused(str(error)))
            self._log = log
            flushing = asyncio.create_task(self._flush_for_ever(log), name="flush")
            refused: StartRefused | None = None
            try:
                await self._bring_up_and_serve(held)
            except StartRefused as error:
                refused = error
                self.request_stop(error.message)
            orphans = await self._take_down()
            flushing.cancel()
            await asyncio.wait({flushing})
            self._log = None
            problem = self._finish_log(log)
        if refused is not None:
            return self._refuse(refused)
        self._tell(SupervisorStopped(orphans=orphans, problem=problem))
        return 0

    def _finish_log(self, log: RunLog) -> str:
        """Log and summary are complete, or why not."""
        problems = []
        try:
            log.close()
        except OSError as error:
            problems.append(f"{log.path} lacks its last {log.unwritten_bytes} bytes: {error.strerror}")
        try:
            self._write_summary(self._run_dir)
        except (OSError, RunLogError) as error:
            problems.append(f"no summary of {self._run_dir}: {error}")
        return "; ".join(problems)

    async def _bring_up_and_serve(self, held: contextlib.ExitStack) -> None:
        """Raises StartRefused."""
        spec, profile = self._spec, self._spec.profile
        anchor = ClockAnchor(monotonic=time.monotonic(), wall=time.time())
        self.emit(
            RunStarted(
                at=anchor.monotonic,
                run=spec.run,
                profile=profile.name,
                model=profile.model.id,
                mode=profile.cluster.mode,
                codec=profile.kv.codec,
                handoff=profile.cluster.handoff,
                wall_at=anchor.wall,
            )
        )
        if spec.load and spec.load not in profile.load:
            raise StartRefused(f"load {spec.load!r} is unknown; allowed: {', '.join(profile.load)}", 2)
        profile = fitted(profile, free_memory_bytes())
        spec = msgspec.structs.replace(spec, profile=profile)
        http = held.enter_context(bind_http(profile.router.host, profile.router.port))
        link = resolve_link(profile)
        held.callback(link.close)
        self.emit(link.describe(time.monotonic()))
        url = url_of(http)
        token = secrets.token_urlsafe(24)
        write_run_info(
            self._run_dir,
            RunInfo(
                run=spec.run,
                profile=profile,
                versions=installed_versions(),
                clock=anchor,
                supervisor_pid=os.getpid(),
                url=url,
                token_path=str(write_token(self._run_dir, token)),
            ),
        )
        self._cluster = RunningCluster(
            spec,
            token,
            link,
            http,
            url,
            emit=self.emit,
            request_stop=self.request_stop,
            worker_spawner=self._worker_spawner,
            router_spawner=self._router_spawner,
        )
        if await self._unless_stopped(self._cluster, self._cluster.start()):
            self.emit(RunReady(at=time.monotonic(), after_s=time.monotonic() - self._began_at, url=url))
            self._flush()
            self._tell(SupervisorUp(pid=os.getpid(), url=url))
            if spec.load:
                await self._unless_stopped(self._cluster, self._cluster.start_load(spec.load))
            await self._unless_stopped(self._cluster, asyncio.Event().wait())

    async def _unless_stopped(self, cluster: RunningCluster, work: Coroutine[Any, Any, object]) -> bool:
        """Do ``work`` until it is done (True) or a stop is asked for (False). Its error, or the ticks', is raised."""
        doing = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait({doing, stop, cluster.ticking}, return_when=asyncio.FIRST_COMPLETED)
            if cluster.ticking.done():
                cluster.ticking.result()
            if doing.done():
                doing.result()
                return True
            return False
        finally:
            doing.cancel()
            stop.cancel()
            await asyncio.wait({doing, stop})

    async def _take_down(self) -> int:
        """Stop all there is; returns how many processes of the run had to be killed beyond that."""
        self.emit(RunStopping(at=time.monotonic(), reason=self._stop_reason))
        left: set[int] = set()
        if self._cluster is not None:
            await self._cluster.stop()
            left.update(self._cluster.processes.survivors())
        await self._worker_spawner.close()
        if self._owns_process:
            left.update(_living_descendants())
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.emit(RunStopped(at=time.monotonic(), orphans=len(left)))
        return len(left)

    def emit(self, event: Event) -> None:
        """Append to the run's log."""
        if self._log is not None:
            self._log.append(event if event.source else msgspec.structs.replace(event, source=SOURCE))

    def _flush(self) -> None:
        if self._log is not None:
            self._log.flush()

    async def _flush_for_ever(self, log: RunLog) -> None:
        """A disk that is full stops nothing as long as what waits for it is bounded."""
        stalled_at: float | None = None
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                log.flush()
            except OSError as error:
                if stalled_at is None:
                    stalled_at = time.monotonic()
                    log_line(f"{log.path} cannot be written: {error.strerror}")
                    self.emit(RunLogStalled(at=stalled_at, reason=error.strerror or str(error)))
                if log.unwritten_bytes > MAX_UNWRITTEN_BYTES:  # a run without its log is not worth its name
                    self.request_stop(f"{log.path} cannot be written: {error.strerror}")
                continue
            if stalled_at is not None:
                now = time.monotonic()
                self.emit(RunLogResumed(at=now, after_s=now - stalled_at))
                stalled_at = None

    def _refuse(self, refused: StartRefused) -> int:
        self._tell(StartFailed(message=refused.message, exit_code=refused.exit_code))
        return refused.exit_code


def _living_descendants() -> list[int]:
    """Processes that hang on to this one, also those that left their group; zombies are not alive."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
    return alive
