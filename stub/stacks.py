"""Describes what the threads of a stub do now."""

import sys
import threading
import traceback
from typing import List

_MAX_FRAMES = 50  # of each thread, the innermost ones
_MAX_LINES = 2000
_LINE_LENGTH = 500


def describe_stacks() -> List[str]:
    """Returns lines with the Python stacks of all threads but the calling one, innermost last.

    The main thread, which runs `execute`, is the first one.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own, main = threading.get_ident(), threading.main_thread().ident
    frames = sys._current_frames()
    lines: List[str] = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        if ident == own:
            continue
        stack = traceback.StackSummary.extract(traceback.walk_stack(frames[ident]))
        stack.reverse()
        lines.append(f"thread {names.get(ident, ident)}:")
        if len(stack) > _MAX_FRAMES:
            lines.append(f"  ... {len(stack) - _MAX_FRAMES} frames")
        for text in traceback.format_list(stack[-_MAX_FRAMES:]):
            lines += text.rstrip("\n").split("\n")
    return [line[:_LINE_LENGTH] for line in lines[:_MAX_LINES]]
