"""Pictures that travel inside the page, as data URIs."""

from __future__ import annotations

import base64
import io

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor


def plot_uri(figure: Figure) -> str:
    """A plot as SVG: sharp at any size, its text drawn as shapes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return _uri("image/svg+xml", stream.getvalue())


def png_uri(content: bytes) -> str:
    """The bytes of a PNG file."""
    return _uri("image/png", content)


def pixels_uri(image: Tensor, bounds: tuple[float, float] | None = None) -> str:
    """An input (1,H,W) or (3,H,W), a pixel each."""
    return png_uri(png_bytes(image, bounds))


def png_bytes(image: Tensor, bounds: tuple[float, float] | None = None) -> bytes:
    """A PNG file of an image (1,H,W) or (3,H,W); values from `bounds`, or the range they have."""
    low, high = bounds or (float(image.min()), float(image.max()))
    scaled = ((image - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round()
    levels = scaled.to(torch.uint8).cpu().movedim(0, -1).squeeze(-1).numpy()
    stream = io.BytesIO()
    Image.fromarray(levels).save(stream, format="PNG", optimize=True)
    return stream.getvalue()


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
