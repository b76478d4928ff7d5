"""The command palette's entries: the action table again."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from console.actions import Action


class HasActions(Protocol):
    """The app."""

    actions: Sequence[Action]


class ActionsProvider(Provider):
    """Every action of the app, with its key in the title."""

    @property
    def _actions(self) -> Sequence[Action]:
        return [action for action in cast(HasActions, self.app).actions if not action.page]

    async def discover(self) -> Hits:
        for action in self._actions:
            yield DiscoveryHit(_title(action), partial(self._run, action), help=action.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for action in self._actions:
            title = _title(action)
            score = matcher.match(title)
            if score > 0:
                yield Hit(score, matcher.highlight(title), partial(self._run, action), help=action.help)

    async def _run(self, action: Action) -> None:
        await self.app.run_action(action.run)


def _title(action: Action) -> str:
    return f"{action.title}  ({action.key_text})" if action.keys else action.title
