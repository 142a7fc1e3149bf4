"""Pictures inside the page, as data URIs."""

from __future__ import annotations

import base64
import io

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

SMALLEST_SIDE = 96  # in pixels: Markdown cannot enlarge a picture
AMPLIFICATIONS = (100.0, 50.0, 20.0, 10.0, 5.0, 3.0, 2.0)


def plot_uri(figure: Figure) -> str:
    """A plot as SVG, with its text drawn as shapes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return _uri("image/svg+xml", stream.getvalue())


def png_uri(content: bytes) -> str:
    """The content of a PNG file."""
    return _uri("image/png", content)


def pixels_uri(image: Tensor, bounds: tuple[float, float] | None = None) -> str:
    """An image (1,H,W) or (3,H,W), with values from `bounds` or the range they have; small images
    are enlarged, each pixel to a square."""
    low, high = bounds or (float(image.min()), float(image.max()))
    scaled = ((image - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round()
    levels = scaled.to(torch.uint8).cpu().movedim(0, -1).squeeze(-1).numpy()
    factor = -(-SMALLEST_SIDE // min(levels.shape[:2]))
    levels = levels.repeat(factor, axis=0).repeat(factor, axis=1)
    stream = io.BytesIO()
    Image.fromarray(levels).save(stream, format="PNG", optimize=True)
    return png_uri(stream.getvalue())


def change_uri(clean: Tensor, changed: Tensor, bounds: tuple[float, float]) -> tuple[str, float]:
    """The difference between two images (C,H,W), and the factor by which it is amplified.

    In gray images red is brighter, blue darker and white unchanged; in color, gray is unchanged.
    """
    step = (changed - clean).float() / (bounds[1] - bounds[0])
    limit = 1.0 if len(step) == 1 else 0.5
    largest = float(step.abs().max())
    factor = next((it for it in AMPLIFICATIONS if it * largest <= limit), 1.0)
    drawn = 0.5 + factor * step
    if len(step) == 1:
        up, down = (factor * step[0]).clamp(0, 1), (-factor * step[0]).clamp(0, 1)
        drawn = torch.stack((1 - down, 1 - up - down, 1 - up))
    return pixels_uri(drawn, (0.0, 1.0)), factor


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
