"""Small pieces of SVG. On a page the style sheet colours what has a class; elsewhere the attributes do."""

import unicodedata
from collections.abc import Sequence
from html import escape
from pathlib import Path

from personafl.errors import StorageFailed

# Told apart without colour vision by lightness, and by the shape of the marker.
COLOURS = ("#315a94", "#d9822b", "#2a8c6a", "#a3367a", "#0a2452", "#7494c4", "#8a5a14", "#6b7280")
GREY = "#8a8f98"


def document(title: str, subtitle: str, width: float, height: float, parts: Sequence[str]) -> str:
    """Return a picture as the text of a file of its own."""
    below = [f'<text x="24" y="52" fill="#555">{safe(subtitle)}</text>'] if subtitle else []
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" font-family="system-ui, sans-serif" font-size="11" fill="#333">\n'
        f"<title>{safe(title)}</title>\n"
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="24" y="32" font-size="18" font-weight="600" fill="#111">{safe(title)}</text>\n'
        + "\n".join([*below, *parts])
        + "\n</svg>\n"
    )


def write_svg(text: str, path: Path) -> None:
    """Write a picture to a file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageFailed(f"{path}: cannot write the picture ({error.strerror}); choose another path") from None


def opened(width: float, height: float, about: str) -> str:
    """Return the start of a picture that is part of a page; `about` tells what it shows to who cannot see it."""
    return (
        f'<svg class="chart" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{safe(about)}" '
        'font-size="12" fill="#333">'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, size: int | None = None) -> str:
    """Return a text; `anchor` is the place in it that is at x."""
    style = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (' font-weight="600"' if bold else "")
    style += f' font-size="{size}"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{safe(words)}</text>'


def rect(
    kind: str, x: float, y: float, width: float, height: float, fill: str, share: float = 1, note: str = ""
) -> str:
    """Return a rectangle of a class, of which a share of the colour shows."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    opacity = f' fill-opacity="{share:.2f}"' if share < 1 else ""
    title = f"<title>{safe(note)}</title>" if note else ""
    return f'<rect class="{kind}" {place} fill="{fill}"{opacity}>{title}</rect>'


def safe(words: str) -> str:
    """Escape what XML would read, and replace what it may not hold."""
    return escape("".join(character if character.isprintable() else "?" for character in words))


def shortened(words: str, most: int) -> str:
    """Return so many characters at most."""
    return words if len(words) <= most else words[: most - 1] + "…"


def wide(words: str) -> float:
    """Return the width of a text in pixels, rather too much than too little: there is no font to measure it by."""
    return sum(12.0 if unicodedata.east_asian_width(c) in "WF" else 6.6 for c in words)
