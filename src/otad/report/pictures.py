"""Pictures that travel inside the page, as data URIs."""

from __future__ import annotations

import base64
import io

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

AMPLIFICATIONS = (100.0, 50.0, 20.0, 10.0, 5.0, 3.0, 2.0)


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


def change_uri(clean: Tensor, moved: Tensor, bounds: tuple[float, float]) -> tuple[str, float]:
    """What differs between two images (C,H,W), and how many times stronger it is drawn.

    In gray images red is brighter, blue darker and white unchanged; in color, gray is unchanged.
    """
    step = (moved - clean).float() / (bounds[1] - bounds[0])
    largest = float(step.abs().max())
    reach = 1.0 if len(step) == 1 else 0.5
    factor = next((it for it in AMPLIFICATIONS if it * largest <= reach), 1.0)
    step = factor * step
    if len(step) == 1:
        up, down = step[0].clamp(0, 1), (-step[0]).clamp(0, 1)
        drawn = torch.stack((1 - down, 1 - up - down, 1 - up))
    else:
        drawn = 0.5 + step
    return pixels_uri(drawn, (0.0, 1.0)), factor


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
