"""The command palette's entries: the action table again."""

from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider

from console.actions import ACTIONS, Action


class ActionsProvider(Provider):
    """Every action of the console, with its key in the title."""

    async def discover(self) -> Hits:
        for action in ACTIONS:
            yield DiscoveryHit(_title(action), partial(self._run, action), help=action.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for action in ACTIONS:
            title = _title(action)
            score = matcher.match(title)
            if score > 0:
                yield Hit(score, matcher.highlight(title), partial(self._run, action), help=action.help)

    async def _run(self, action: Action) -> None:
        await self.app.run_action(action.run)


def _title(action: Action) -> str:
    return f"{action.title}  ({action.key_text})"
