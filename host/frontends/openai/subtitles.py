"""Writes the segments of a transcription as subtitles: SRT and WebVTT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Segments = Sequence[Mapping[str, Any]]
"""Objects with `start` and `end` in seconds, and `text`."""


def write_srt(segments: Segments) -> str:
    """Writes SubRip: numbered cues, with a comma before the milliseconds."""
    return "".join(
        f"{number}\n{_time(segment['start'], ',')} --> {_time(segment['end'], ',')}\n"
        f"{_text(segment)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def write_vtt(segments: Segments) -> str:
    """Writes WebVTT: a head, and cues with a point before the milliseconds."""
    cues = (
        f"{_time(segment['start'], '.')} --> {_time(segment['end'], '.')}\n{_text(segment)}\n\n"
        for segment in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _time(seconds: float, point: str) -> str:
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _text(segment: Mapping[str, Any]) -> str:
    """Returns the text of a cue: an empty line, or an arrow, would end or break the cue."""
    lines = str(segment["text"]).replace("-->", "->").splitlines()
    return "\n".join(line for line in map(str.strip, lines) if line)
