"""The templates that are kept: by their key, not too many, none that is stale, none that idles for long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from ostler.keeper.boxes import Box, BoxLimits
from ostler.keeper.children import Children
from ostler.keeper.emptying import Emptying, Place
from ostler.keeper.protocol import MARK
from ostler.keeper.tag import TEMPLATE, tag_for
from ostler.keeper.template import Birth, Recipe, Template
from ostler.keeper.units import House

MOST = 8
IDLE_SECONDS = 600.0
#: A module may start much when it is imported, but not without end.
_LIMITS = BoxLimits(pids=1024)


class Templates:
    def __init__(self, house: House, children: Children, emptying: Emptying) -> None:
        self._loop = emptying.loop
        self._house = house
        self._children = children
        self._emptying = emptying
        #: Boxes of templates, also of those that have ended and left something in them.
        self._boxes: dict[str, Box] = {}
        self._kept: dict[str, Template] = {}
        #: Started for those of a burst whose module cannot be forked: each becomes one agent.
        self._single: set[Template] = set()

    def bring_forth(self, key: str, recipe: Recipe, birth: Birth) -> None:
        """Raises `OSError` when a template cannot even be started."""
        template = self._kept.get(key)
        if template is not None and template.is_ready and (template.is_stale() or template.is_dead()):
            del self._kept[key]
            template.retire()
            template = None
        if template is None:
            template = self._start(recipe, lambda one: self._ready(key, one))
            self._kept[key] = template
            self._make_room(template)
        if not template.is_ready:
            template.hold(birth)
            return
        if not template.forks:
            del self._kept[key]
        template.bring_forth(birth)

    def _start(self, recipe: Recipe, ready: Callable[[Template], None]) -> Template:
        """Each in a box of its own. Raises `OSError`."""
        name = f"{TEMPLATE}{os.urandom(6).hex()}"
        environment = {**recipe.settle["env"], MARK: f"{self._house.token}:{name}"}
        tag = tag_for(self._house.token, name)
        recipe = recipe._replace(settle={**recipe.settle, "env": environment, "tag": tag})
        box = self._boxes[name] = self._house.boxes.make(name, _LIMITS)
        try:
            return Template(self._loop, self._children, recipe, box, ready=ready, gone=self._drop)
        except OSError:
            self._remove(box)
            raise

    @property
    def boxes(self) -> list[Box]:
        return list(self._boxes.values())

    def clear(self, names: Iterable[str]) -> None:
        """What the templates of the keeper before us left."""
        for name in names:
            self._boxes[name] = self._house.boxes.find(name, _LIMITS)
            self._empty(self._boxes[name])

    def _empty(self, box: Box) -> None:
        """What its module has started ends with it."""
        if box.name in self._boxes:
            units = [box.name]
            self._emptying.begin(Place(box, None, units, lambda _: self._remove(box), is_template=True))

    def _remove(self, box: Box) -> None:
        if self._boxes.pop(box.name, None) is not None:
            box.remove()

    def _ready(self, key: str, template: Template) -> None:
        waiting, template.waiting = template.waiting, []
        if template.forks:
            for birth in waiting:
                template.bring_forth(birth)
            return
        if not waiting:
            return
        self._drop(template)
        template.bring_forth(waiting[0])
        for birth in waiting[1:]:
            try:
                single = self._start(template.recipe, lambda one: self._ready(key, one))
            except OSError as error:
                birth.close()
                birth.failed("template", f"no template could be started: {error}")
                continue
            single.hold(birth)
            self._single.add(single)

    def _drop(self, template: Template) -> None:
        self._single.discard(template)
        for key, one in list(self._kept.items()):
            if one is template:
                del self._kept[key]
        if template.is_over:
            self._empty(template.box)

    def retire_idle(self) -> None:
        now = time.monotonic()
        for key, template in list(self._kept.items()):
            if now - template.used > IDLE_SECONDS and not template.waiting and not template.told:
                del self._kept[key]
                template.retire()

    def _make_room(self, newest: Template) -> None:
        spare = [
            (template.used, key)
            for key, template in self._kept.items()
            if template is not newest and not template.waiting and not template.told
        ]
        for _, key in sorted(spare)[: max(0, len(self._kept) - MOST)]:
            self._kept.pop(key).retire()

    def close(self) -> None:
        for template in (*self._kept.values(), *self._single):
            template.kill()
        self._kept.clear()
        self._single.clear()
