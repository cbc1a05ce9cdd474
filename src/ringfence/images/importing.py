"""Imports: finds out what a source is, has it applied to a new tree, and keeps the image."""

from __future__ import annotations

import os
import stat

from ringfence.errors import ImageError
from ringfence.files.imagestore import checked_name
from ringfence.images import archives, engines
from ringfence.images.making import Making, Wanted, silent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.files.imagestore import ImageInfo, Store
    from ringfence.images.archives import Described


def import_source(store: Store, name: str, source: str, progress: Callable[[str], None] | None) -> ImageInfo:
    """See ringfence.images.import_image."""
    check_free_name(name)
    say = progress or silent
    engine = engines.split(source)
    if engine is None:
        _check_source(store, source)
    with Making(store, source) as making:
        if engine is not None:
            saved = f"{making.scratch}/saved.tar"
            engines.save(*engine, saved, say)
            described = archives.apply_file(making.tree, saved, scratch=making.scratch, progress=say)
        elif os.path.isdir(source):
            say(f"reading {source}")
            described = archives.apply_directory(making.tree, source)
        else:
            described = archives.apply_file(making.tree, source, scratch=making.scratch, progress=say)
        _check_content(making, source)
        return making.keep(_wanted(name, described))


def check_free_name(name: str) -> None:
    """Raises PolicyError for what is no name, ImageError for the one that is not in the store."""
    checked_name(name)
    if name == "host":
        raise ImageError('"host" is this machine itself, and always there', code="image-name", fix="take another name")
    if "+" in name:
        raise ImageError(f"{name!r} is no name of an image", code="image-name", fix='leave the "+" out')


def _check_source(store: Store, source: str) -> None:
    mode = os.stat(source).st_mode
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise ImageError(f"{source} is neither a file nor a folder", code="image-source", fix="name an archive")
    if stat.S_ISDIR(mode):
        real, ours = os.path.realpath(source), os.path.realpath(store.directory)
        if os.path.commonpath([real, ours]) == real:
            raise ImageError(
                f"{source} holds the store of images itself ({ours})",
                code="image-source",
                fix="import a folder that is a root file system of its own",
            )


def _check_content(making: Making, source: str) -> None:
    """An empty archive, or a folder of documents, is no root file system; better said now than by the first run."""
    programs = [("bin",), ("usr", "bin"), ("sbin",), ("usr", "local", "bin"), ("busybox",)]
    if not any(making.tree.find(path) is not None for path in programs):
        raise ImageError(
            f"{source} holds no root file system: it has neither bin nor usr/bin at its top",
            code="image-source",
            fix="pack the root itself: tar -C ROOT -cf FILE .",
        )


def _wanted(name: str, described: Described) -> Wanted:
    return Wanted(name=name, source=described.source, env=described.env, config=described.config, notes=described.notes)
