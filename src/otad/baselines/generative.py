"""Purifiers by generative models: APE-GAN, and diffusion as in DiffPure."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from otad.baselines.purification import BoundedPurifier, register_purifier
from otad.checks import check_count, require
from otad.errors import import_extra
from otad.nets.inputs import Sizes, check_image_shape

FIT, FOOL = 0.7, 0.3  # the weights of the two losses of a generator in APE-GAN
TIMES = 1000  # steps of the diffusion from an image to noise


def _layer(kind: type[nn.Module], fan_in: int, fan_out: int, *, norm: bool = True) -> nn.Module:
    """Return a layer that halves or doubles the sides, with its normalization and activation."""
    parts: list[nn.Module] = [kind(fan_in, fan_out, 4, 2, 1)]
    parts += [nn.BatchNorm2d(fan_out)] * norm + [nn.LeakyReLU(0.2)]
    return nn.Sequential(*parts)


@register_purifier("ape_gan")
class ApeGan(BoundedPurifier):
    """APE-GAN (Jin et al. 2019): a generator that is trained to undo attacks on a network.

    The generator learns to map attacked images to the images themselves, and to deceive a
    discriminator that learns to tell its results from clean images. Train it by `train_purifier`.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image, with sides that 4 divides.
    width : int
        The number of channels of the first layer; the second has twice as many.
    seed : int
        The seed of the weights.
    bounds : (float, float)
        The lowest and the highest legal input value.

    Examples
    --------
    >>> import torch
    >>> from otad.baselines import ApeGan
    >>> purifier = ApeGan((1, 8, 8), width=4).eval()
    >>> purifier(torch.rand(2, 1, 8, 8)).shape, purifier.randomized
    (torch.Size([2, 1, 8, 8]), False)
    """

    settings = ("width",)
    learns_from_attacks = True

    def __init__(
        self, input_shape: Sizes, *, width: int = 64, seed: int = 0, **options: Any
    ) -> None:
        channels, height, across = check_image_shape(input_shape, 4)
        super().__init__(input_shape, **options)
        self.width = check_count(width, "width")
        down, up, wide = nn.Conv2d, nn.ConvTranspose2d, 2 * width
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.generator = nn.Sequential(
                _layer(down, channels, width, norm=False),
                _layer(down, width, wide),
                _layer(up, wide, width),
                up(width, channels, 4, 2, 1),
                nn.Tanh(),
            )
            self.discriminator = nn.Sequential(
                _layer(down, channels, width, norm=False),
                _layer(down, width, wide),
                nn.Flatten(),
                nn.Linear(wide * height * across // 16, 1),
            )

    def purify(self, x: Tensor) -> Tensor:
        return self.from_units(self.generator(self.normalize(x)))

    def loss(self, x: Tensor, attacked: Tensor) -> Tensor:
        clean, made = self.normalize(x), self.generator(self.normalize(attacked))
        judge = self.discriminator
        # One step trains both: the generator sees the discriminator's weights as constants.
        fixed = {name: weight.detach() for name, weight in judge.named_parameters()}
        fooled = functional.softplus(-functional_call(judge, fixed, (made,))).mean()
        told = functional.softplus(-judge(clean)) + functional.softplus(judge(made.detach()))
        return FIT * functional.mse_loss(made, clean) + FOOL * fooled + told.mean()


@register_purifier("diffusion")
class Diffusion(BoundedPurifier):
    """Purification by diffusion, as in DiffPure (Nie et al. 2022), with a small DDPM of your own.

    Gaussian noise is added to an image as in `noise_step` of 1000 steps of diffusion, and the
    denoising network removes it again, in `calls` steps. It needs the extra `purification`. Train
    it by `train_purifier`. Two calls give two results. The gradient goes through all steps.
    DiffPure itself uses a large published network and solves a stochastic differential equation.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image. Each further width halves its sides.
    noise_step : int
        How much noise is added: the time from 0 (nearly none) to 999 (nothing but noise).
    calls : int
        How often the network is called to remove the noise.
    widths : sequence of int
        The channels of the U-Net at each resolution, multiples of 8. The last has attention.
    depth : int
        The number of residual blocks at each resolution.
    seed : int
        The seed of the weights.
    bounds : (float, float)
        The lowest and the highest legal input value.

    Examples
    --------
    >>> import torch
    >>> from otad.baselines import Diffusion
    >>> Diffusion.randomized
    True
    >>> purifier = Diffusion((1, 8, 8), widths=(8, 16))  # doctest: +SKIP
    >>> purifier(torch.rand(2, 1, 8, 8)).shape  # doctest: +SKIP
    torch.Size([2, 1, 8, 8])
    """

    settings = ("noise_step", "calls", "widths", "depth")
    randomized = True

    def __init__(
        self,
        input_shape: Sizes,
        *,
        noise_step: int = 100,
        calls: int = 10,
        widths: Sizes = (64, 128, 128),
        depth: int = 2,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.widths = tuple(check_count(width, "widths") for width in widths)
        eights = self.widths and not any(width % 8 for width in self.widths)
        require(eights, "widths", "at least one multiple of 8", self.widths)
        further = len(self.widths) - 1
        channels, *sides = check_image_shape(input_shape, 2**further)
        super().__init__(input_shape, **options)
        self.noise_step = check_count(noise_step, "noise_step", least=0, most=TIMES - 1)
        self.calls = check_count(calls, "calls", most=self.noise_step + 1)
        self.depth = check_count(depth, "depth")
        library = import_extra("diffusers", "purification")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.unet = library.UNet2DModel(
                tuple(sides),
                channels,
                channels,
                layers_per_block=depth,
                block_out_channels=self.widths,
                down_block_types=("DownBlock2D",) * further + ("AttnDownBlock2D",),
                up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * further,
                norm_num_groups=math.gcd(32, *self.widths),
            )
        self._scheduler = library.DDPMScheduler(TIMES)
        times = torch.linspace(self.noise_step, 0, self.calls).round().long().tolist()
        self._scheduler.set_timesteps(timesteps=times)

    def predict_noise(self, noisy: Tensor, times: Tensor) -> Tensor:
        """Return the noise in noisy images (B, C, H, W) at times (B,) or ()."""
        return self.unet(noisy, times).sample  # type: ignore[no-any-return]

    def add_noise(self, u: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return images in [-1, 1] with noise (B, C, H, W), as after `times` (B,) of diffusion."""
        return self._scheduler.add_noise(u, noise, times)  # type: ignore[no-any-return]

    def purify(self, x: Tensor) -> Tensor:
        times = self._scheduler.timesteps.to(x.device)
        u = self.normalize(x)
        u = self.add_noise(u, torch.randn_like(u), times[:1].expand(len(u)))
        for time in times:
            # The backward pass computes each call again, so that memory does not grow with them.
            noise = checkpoint(self.predict_noise, u, time, use_reentrant=False)
            u = self._scheduler.step(noise, time.cpu(), u).prev_sample
        return self.from_units(u)

    def loss(self, x: Tensor, attacked: Tensor) -> Tensor:
        noise, times = torch.randn_like(x), torch.randint(TIMES, (len(x),), device=x.device)
        noisy = self.add_noise(self.normalize(x), noise, times)
        return functional.mse_loss(self.predict_noise(noisy, times), noise)
