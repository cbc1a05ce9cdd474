"""The zygote of a pool, and the templates that were made of it: one for each view, remade when the zygote is gone."""

from __future__ import annotations

import _thread

from ringfence.backends.process import canary
from ringfence.backends.process.zygote import Template, Zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringfence.backends.process.cgroup import Tree
    from ringfence.plan.interpreter import Interpreter
    from ringfence.plan.model import ProcessPlan


class Templates:
    """Safe from several threads."""

    def __init__(self, interpreter: Interpreter, preload: tuple[str, ...], tree: Tree | None) -> None:
        self._interpreter = interpreter
        self._preload = preload
        self._tree = tree
        self._lock = _thread.allocate_lock()
        self._zygote: Zygote | None = None
        self._of_view: dict[int, Template] = {}
        self._outgrown: list[Template] = []  # replaced, and still with sandboxes

    def get(self, plan: ProcessPlan) -> Template:
        """Policies that differ in limits alone share a view, and so its template."""
        view = id(plan.template)
        with self._lock:
            zygote = self._live_zygote()
            found = self._of_view.get(view) if plan.shared else None
        if found is not None:
            return found
        template = zygote.template(plan)
        if plan.shared:
            with self._lock:
                known = self._of_view.setdefault(view, template)
            if known is not template:  # another thread built one at the same time
                template.close()
                return known
        return template

    def grown(self, plan: ProcessPlan) -> Template:
        """One from a zygote that has loaded everything: what is kept is to be fast."""
        template = self.get(plan)
        if not template.young:
            return template
        grown = template.zygote.template(plan)
        try:
            grown.wait_built()
        except BaseException:
            grown.close()
            raise
        with self._lock:
            known = self._of_view.get(id(plan.template))
            if known is template:
                self._of_view[id(plan.template)] = known = grown
                self._outgrown.append(template)
        if known is not grown:  # lost meanwhile, or another thread's
            grown.close()
            return self.get(plan)
        return grown

    def close_outgrown(self, used: Iterable[Template]) -> None:
        """Those of the past that are not in `used`."""
        with self._lock:
            unused = [template for template in self._outgrown if template not in used]
            self._outgrown = [template for template in self._outgrown if template not in unused]
        for template in unused:
            template.close()

    @property
    def has_outgrown(self) -> bool:
        return bool(self._outgrown)

    def drop(self, plan: ProcessPlan, template: Template) -> None:
        """Close it. Not one that another thread has put in its place meanwhile."""
        with self._lock:
            if self._of_view.get(id(plan.template)) is template:
                del self._of_view[id(plan.template)]
        template.close()

    def release(self, view: tuple[object, ...]) -> None:
        with self._lock:
            template = self._of_view.pop(id(view), None)
        if template is not None:
            template.close()

    def close(self) -> None:
        for template in self._all():
            template.close()
        if self._zygote is not None:
            self._zygote.close()

    def abandon(self) -> Zygote | None:
        """Let go of every descriptor. What is left is for the caller to see end, which may take a while."""
        for template in self._all():
            template.abandon()
        return self._zygote

    def forget(self) -> None:
        """In a forked child of the library."""
        for template in self._all():
            template.forget()
        if self._zygote is not None:
            self._zygote.forget()

    def _all(self) -> tuple[Template, ...]:
        return (*self._of_view.values(), *self._outgrown)

    def _live_zygote(self) -> Zygote:
        if self._zygote is None or not self._zygote.alive:
            if self._zygote is not None:
                self._zygote.close()
                for template in self._of_view.values():
                    template.close()
                self._of_view.clear()
            canary.open_once()
            self._zygote = Zygote(self._interpreter, self._preload, self._tree)
        return self._zygote
