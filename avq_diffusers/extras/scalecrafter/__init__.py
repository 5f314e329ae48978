"""ScaleCrafter: images larger than a UNet was trained on.

He et al., "ScaleCrafter: Tuning-free Higher-Resolution Visual Generation with Diffusion Models",
arXiv 2310.07702. During the first part of the denoising, the 3x3 convolutions of the deeper levels
are dilated, so that they see as much of the image as in training; otherwise objects repeat.
"""
