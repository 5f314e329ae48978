"""What becomes of an image before it is encoded."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from toy_data import png

from distill.data.images import crop, linfusion, read_rgb

pytestmark = pytest.mark.usefixtures("no_traces")


def test_crop_takes_the_middle_square():
    columns = np.zeros((2, 4, 3), np.uint8)
    columns[:, 1], columns[:, 2] = (0, 255, 0), (0, 0, 255)
    expected = [[[0, 0]] * 2, [[255, 0]] * 2, [[0, 255]] * 2]
    assert crop(Image.fromarray(columns), 2).tolist() == expected
    assert crop(Image.fromarray(columns.swapaxes(0, 1)), 2)[1].tolist() == [[255, 255], [0, 0]]


def test_crop_is_antialiased_and_linfusion_is_not():
    """At a third of the side LinFusion's samples are single pixels; a mean is not."""
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    picture = Image.fromarray(noise)
    assert np.array_equal(linfusion(picture, 32).permute(1, 2, 0), noise[1::3, 1::3])
    assert crop(picture, 32).float().std() < 0.6 * linfusion(picture, 32).float().std()


def test_linfusion_is_opencv():
    """`cv2.resize(grey, (4, 4), interpolation=cv2.INTER_CUBIC)` gave these figures."""
    grey = (np.arange(35) ** 2 * 31 % 256).astype(np.uint8).reshape(5, 7)
    expected = torch.tensor(
        [[28, 127, 226, 53], [219, 137, 110, 133], [122, 0, 154, 122], [218, 217, 12, 243]]
    )
    found = linfusion(Image.fromarray(grey).convert("RGB"), 4)
    assert (found.int() - expected).abs().max() <= 1  # OpenCV has 11 bits for a weight
    # By hand: at half the side the weights are a/8 = -3/32 and (5 + ...)/8 = 19/32, edges repeat.
    line = Image.fromarray(np.array([[0, 200, 0, 0]] * 4, np.uint8)).convert("RGB")
    assert linfusion(line, 2)[0].tolist() == [[round(200 * 19 / 32), 0]] * 2


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (Image.new("RGBA", (2, 2), (200, 0, 0, 128)), (227, 127, 127)),
        (Image.new("LA", (2, 2), (0, 0)), (255, 255, 255)),
        (Image.new("L", (2, 2), 9), (9, 9, 9)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("RGB", (2, 2), (1, 2, 3)).convert("P"), None),
        (Image.fromarray(np.full((2, 2), 0x4080, np.uint16)), (64, 64, 64)),
    ],
)
def test_pictures_become_rgb(picture, expected):
    """Catches transparent pixels in their hidden colour, and 16 bits clipped to white."""
    found = read_rgb(BytesIO(png(picture)))
    assert found.mode == "RGB"
    assert found.getpixel((1, 1)) == (expected or picture.convert("RGB").getpixel((1, 1)))


def test_numbers_of_more_than_16_bits():
    """Catches images that are clipped to white or black without a word."""
    file = BytesIO(b"P5 2 2 65535\n" + np.full(4, 0x4080, ">u2").tobytes())
    assert read_rgb(file).getpixel((1, 1)) == (64, 64, 64)
    for mode in ("I", "F"):
        file = BytesIO()
        Image.new(mode, (2, 2), 1).save(file, "tiff")
        with pytest.raises(ValueError, match=f"TIFF of mode {mode} does not say what is white"):
            read_rgb(file)


def test_images_are_upright_and_palettes_transparent():
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([10, 20, 30])
    file = BytesIO()
    palette.save(file, "png", transparency=0)
    assert read_rgb(file).getpixel((0, 0)) == (255, 255, 255)

    wide = Image.fromarray(np.repeat([[[255] * 3, [0] * 3]], 16, 1).repeat(16, 0).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: left becomes top
    file = BytesIO()
    wide.save(file, "jpeg", exif=exif, quality=95)
    upright = read_rgb(file)
    assert upright.size == (16, 32)
    assert upright.getpixel((8, 4))[0] > 200 > 50 > upright.getpixel((8, 28))[0]
