import base64
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig

from kimi_hf.errors import ConfigError, MediaError
from kimi_hf.processing.image_plan import RELEASED_MEDIA_PROC_CFG, Background, read_settings
from kimi_hf.processing.image_processing_kimi_k3 import KimiK3VisionProcessor, background_pixels, patchify, to_rgb
from kimi_hf.processing.media_loading import load_image, load_images

FILES = ["0_RGB_60x45", "1_RGBA_33x101", "2_L_28x28", "3_LA_90x20", "4_RGB_1x1", "5_P_57x57"]
# As released: no image_processor_type, classes named by auto_map only.
RELEASED_FILE = {
    "auto_map": {
        "AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor",
        "AutoProcessor": "kimi_k3_processor.KimiK3Processor",
    },
    "media_proc_cfg": {**RELEASED_MEDIA_PROC_CFG, "from_the_future": [1, 2]},
}


@pytest.fixture
def processor():
    return KimiK3VisionProcessor()


def picture(mode="RGB", size=(40, 30), seed=0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.frombytes(mode, size, values.tobytes())


def encoded(image: Image.Image, kind="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("name", FILES)
def test_goldens(processor, goldens, name):
    golden = load_file(goldens("images/golden.safetensors"))
    out = processor(str(goldens(f"images/{name}.png")))
    assert out["grid_thws"].tolist() == [golden[f"{name}.png.grid_thw"].tolist()]
    assert out["pixel_values"].dtype == torch.float32 and out["grid_thws"].dtype == torch.int64
    assert torch.equal(out["pixel_values"], golden[f"{name}.png.pixel_values"])


def test_plans(goldens):
    for case in json.loads(goldens("images/plans.json").read_text()):
        limits = {"in_patch_limit": case["limit"], "patch_limit_on_one_side": case["side"]}
        plan = read_settings(limits).plan(case["width"], case["height"])
        assert [plan.width, plan.height, plan.pad_width, plan.pad_height] == case["plan"]


def test_token_counts(processor):
    assert processor.num_image_tokens(6480, 2393) == 16748  # padding may pass the limit
    assert processor.num_image_tokens(1, 1) == 1
    assert processor.num_image_tokens(60, 45) == processor.get_number_of_image_patches(45, 60) // 4 == 6
    assert processor.num_image_tokens(1024, 768, in_patch_limit=256, patch_limit_on_one_side=64) == 70


def test_many_images_at_once_equal_each_alone(processor, goldens):
    paths = [goldens(f"images/{name}.png") for name in FILES]
    together = processor([[paths[0], paths[1]], paths[2:]])
    alone = [processor(path) for path in paths]
    assert torch.equal(together["pixel_values"], torch.cat([a["pixel_values"] for a in alone]))
    assert torch.equal(together["grid_thws"], torch.cat([a["grid_thws"] for a in alone]))
    nothing = processor([])
    assert nothing["pixel_values"].shape == (0, 3, 14, 14) and nothing["grid_thws"].shape == (0, 3)
    assert isinstance(processor(paths[0], return_tensors="np")["pixel_values"], np.ndarray)


def test_every_way_to_give_an_image(processor, tmp_path):
    image = picture()
    array, png = np.asarray(image), encoded(image)
    path = tmp_path / "a picture.png"
    path.write_bytes(png)
    text = base64.b64encode(png).decode()
    wanted = processor(image)["pixel_values"]
    ways = {
        "PIL": image,
        "numpy HWC": array,
        "numpy CHW": array.transpose(2, 0, 1),
        "numpy int64": array.astype(np.int64),
        "numpy float": array.astype(np.float64) / 255,
        "numpy 4-D": array[None],
        "torch CHW": torch.tensor(array).permute(2, 0, 1),
        "torch HWC": torch.tensor(array),
        "torch float": torch.tensor(array).permute(2, 0, 1).float().requires_grad_(False) / 255,
        "path": path,
        "path text": str(path),
        "file URL": path.as_uri(),
        "bytes": png,
        "bytearray": bytearray(png),
        "file object": io.BytesIO(png),
        "base64": text,
        "base64, wrapped": base64.encodebytes(png).decode(),
        "data URL": f"data:image/png;base64,{text}",
        "data URL, upper case": f"DATA:image/png;base64,{text}",
        "data URL, escaped": "data:image/png;charset=utf-8;base64," + text.replace("+", "%2B"),
        "data URL, percent": "data:image/png," + "".join(f"%{byte:02x}" for byte in png),
        "image part": {"type": "image", "image": image},
        "image_url part": {"type": "image_url", "image_url": f"data:image/png;base64,{text}"},
        "OpenAI part": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}", "detail": "low"}},
        "transformers part": {"type": "image", "path": str(path)},
        "untyped part": {"image": png},
    }
    for name, way in ways.items():
        assert torch.equal(processor(way)["pixel_values"], wanted), name


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA"])
def test_arrays_of_all_channel_counts(processor, mode):
    image = picture(mode)
    assert torch.equal(processor(np.asarray(image))["pixel_values"], processor(image)["pixel_values"])


def test_ambiguous_arrays_follow_the_stated_format_or_the_library_s_habit():
    square = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    last, first = Image.fromarray(square), Image.fromarray(np.ascontiguousarray(square.transpose(1, 2, 0)))
    assert load_image(square) == last == load_image(torch.tensor(square), input_data_format="channels_last")
    assert load_image(torch.tensor(square)) == first == load_image(square, input_data_format="channels_first")


def test_small_base64_texts_are_not_taken_for_paths(processor):
    image = picture(size=(12, 12))  # longer than a file name may be, shorter than a path
    text = base64.b64encode(encoded(image)).decode()
    assert 255 < len(text) < 4096
    assert torch.equal(processor(text)["pixel_values"], processor(image)["pixel_values"])


@pytest.mark.parametrize("size", [(1, 1), (9000, 1), (1, 9000), (29, 27)])
def test_extreme_sizes(processor, size):
    image = picture(size=size)
    out = processor(image)
    assert (
        out["grid_thws"].prod() == processor.get_number_of_image_patches(size[1], size[0]) == len(out["pixel_values"])
    )
    assert out["grid_thws"].max() <= 512


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_show_their_first_picture(processor, kind):
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "WEBP" else {}
    moving = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(moving)).n_frames == 3
    assert torch.equal(processor(moving)["pixel_values"], processor(frames[0])["pixel_values"])


@pytest.mark.parametrize("mode", ["1", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
def test_unusual_modes_go_through_pil_s_conversion(processor, mode):
    image = picture("L", (56, 28)).convert(mode) if mode != "I;16" else Image.new("I;16", (56, 28), 300)
    wanted = np.asarray(image.resize(image.size, Image.Resampling.BICUBIC).convert("RGB"))
    settings = read_settings(RELEASED_MEDIA_PROC_CFG)
    assert np.array_equal(processor(image, return_tensors="np")["pixel_values"], patchify(wanted, settings))


def test_palette_with_transparency_is_composited():
    image = picture("RGB").quantize(8)
    image.info["transparency"] = 0
    rgba = np.asarray(image.convert("RGBA")).astype(np.float32)
    assert (rgba[..., 3] == 0).any()
    rgb = to_rgb(image, read_settings(RELEASED_MEDIA_PROC_CFG).background)
    hidden = rgba[..., 3] == 0
    assert set(np.unique(rgb[hidden])) <= {180, 255}
    assert np.array_equal(rgb[~hidden], rgba[..., :3].astype(np.uint8)[~hidden])


def test_chessboard_and_blending_are_as_specified():
    board = background_pixels(Background("chessboard", 8, True, 255, 180), 20, 24)
    assert (board[0, 0], board[0, 8], board[8, 0], board[8, 8]) == (255, 180, 180, 255)
    assert np.array_equal(board[9:], background_pixels(Background("chessboard", 8, True, 255, 180), 11, 24, top=9))
    flipped = background_pixels(Background("chessboard", 8, False, 255, 180), 20, 24)
    assert np.array_equal(board + flipped, np.full((20, 24), 435))
    assert background_pixels(Background("white"), 1, 1) == 255 and background_pixels(Background(), 1, 1) == 0
    image = picture("RGBA", (24, 600))  # taller than one band
    rgba = np.asarray(image).astype(np.float32)
    alpha = rgba[..., 3:] / np.float32(255)
    board = background_pixels(Background("chessboard", 8, True, 255, 180), 600, 24)[..., None]
    wanted = (alpha * rgba[..., :3] + (1 - alpha) * board).astype(np.uint8)
    assert np.array_equal(to_rgb(image, Background("chessboard", 8, True, 255, 180)), wanted)


def test_fill_stage_and_missing_background():
    image = picture("RGBA", (300, 200))
    small = {"in_patch_limit": 16}
    chess = RELEASED_MEDIA_PROC_CFG["transparent_bg_config"]
    after = KimiK3VisionProcessor({"transparent_bg_config": chess, "transparent_bg_fill_stage": "after_resize"})
    before = KimiK3VisionProcessor({"transparent_bg_config": chess})
    plain = KimiK3VisionProcessor({})
    first = to_rgb(image, read_settings({"transparent_bg_config": chess}).background)
    assert torch.equal(before(image, **small)["pixel_values"], plain(first, **small)["pixel_values"])
    assert not torch.equal(after(image, **small)["pixel_values"], before(image, **small)["pixel_values"])
    size = after(image, **small)["grid_thws"]
    assert torch.equal(size, plain(image, **small)["grid_thws"])


def test_exif_is_ignored_unless_asked(processor):
    image = picture(size=(60, 30))
    tagged = Image.open(io.BytesIO(encoded(image, "PNG", exif=_orientation(6))))
    assert torch.equal(processor(tagged)["pixel_values"], processor(image)["pixel_values"])
    upright = processor(tagged, apply_exif_orientation=True)["pixel_values"]
    assert torch.equal(upright, processor(image.transpose(Image.Transpose.ROTATE_270))["pixel_values"])
    assert KimiK3VisionProcessor(apply_exif_orientation=True).load(tagged)[0].size == (30, 60)


@pytest.mark.filterwarnings("ignore:Image was not the expected size")
def test_icons_are_as_large_as_what_is_inside(processor):
    icon = bytearray(encoded(picture(size=(200, 200)), "ICO", sizes=[(200, 200)]))
    icon[6:8] = bytes((16, 16))  # what the directory of an icon says need not be so
    with pytest.raises(MediaError, match="200 x 200 pixels are more than the limit of 1000"):
        processor(bytes(icon), max_image_pixels=1000)


def test_broken_exif_is_said(processor, monkeypatch):
    def broken(image):
        raise SyntaxError("not a TIFF file")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", broken)
    with pytest.raises(MediaError, match="image 1 of 2: its EXIF data cannot be read: not a TIFF file"):
        processor([picture(), picture()], apply_exif_orientation=True)


def _orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def test_bombs_are_refused_before_decoding(processor, monkeypatch):
    bomb = encoded(Image.new("1", (20_000, 10_000)))  # 25 kB of file, 200 million pixels
    with pytest.raises(MediaError, match="image 2 of 2: 20000 x 10000 pixels are more than the limit of 178956970"):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        processor([picture(), bomb])
    with pytest.raises(MediaError, match="40 x 30 pixels are more than the limit of 1000"):
        processor(picture(), max_image_pixels=1000)
    with pytest.raises(MediaError, match="more than the limit"):
        processor(np.zeros((40, 30, 3), np.uint8), max_image_pixels=1000)
    with pytest.raises(MediaError, match="PIL has a limit of its own"):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        processor(encoded(picture()))
    assert processor(picture(), max_image_pixels=None)["grid_thws"].tolist() == [[1, 4, 4]]


@pytest.mark.parametrize(
    "media, words",
    [
        ("no/such/file.png", "neither a file, nor a data: URL, nor base64"),
        ("https://example.org/a.png", "not fetched; download it"),
        ("data:text/plain;base64,AAAA", "'text/plain' is not an image"),
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,!!!", "damaged"),
        ("AAAA", "base64 text 'AAAA' is not a readable image"),
        ("no/such/\u00e4.png", "neither a file"),
        ("a" * 300, "base64 text 'aaa.* is not a readable image"),
        (" ", "an empty text"),
        ("file:///%ff%fe.png", "cannot read"),
        (None, "found None; leave it out"),
        (b"not an image", "the file of 12 bytes is not a readable image"),
        (encoded(picture())[:60], "readable image"),
        (Image.open(io.BytesIO(encoded(picture(size=(300, 300)))[:9000])), "the PIL image does not hold .*truncated"),
        (encoded(picture(), "EPS"), "not a readable image"),  # PIL would start a program to read it
        (torch.zeros(3, 4, 4, device="meta"), "numpy cannot hold"),
        (torch.zeros(3, 4).to_sparse(), "numpy cannot hold"),
        (np.zeros((3, 4, 5, 6, 7)), "not one image"),
        (np.zeros((7, 5, 6), np.uint8), "no channel axis"),
        (np.full((4, 4, 3), 1.5), "0..1"),
        (np.full((4, 4, 3), np.nan), "0..1"),
        (np.full((4, 4, 3), 300), "0..255"),
        (np.zeros((0, 4, 3), np.uint8), "empty"),
        (np.zeros((4, 4, 3), np.complex64), "complex64"),
        ({"type": "video", "video": "a.mp4"}, "media of type 'video' is not supported"),
        ({"type": "image"}, "carries no image"),
        (3.5, "cannot read an image from float"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_bad_images_say_which_and_why(processor, media, words):
    with pytest.raises(MediaError, match=f"image 2 of 2: .*{words}"):
        processor([picture(), media])


def test_texts_of_strangers_name_no_files(processor, tmp_path, monkeypatch):
    picture().save(tmp_path / "a.png")
    texts = (str(tmp_path / "a.png"), (tmp_path / "a.png").as_uri())
    base64_text = base64.b64encode(encoded(picture())).decode()
    monkeypatch.setattr(KimiK3VisionProcessor, "reads_paths", False)
    for text in texts:
        with pytest.raises(MediaError, match="is neither a data: URL, nor base64 text"):
            processor(text)
    assert torch.equal(processor(base64_text)["pixel_values"], processor(tmp_path / "a.png")["pixel_values"])
    assert "reads_paths" not in processor.to_dict()


def test_a_directory_and_a_missing_path(processor, tmp_path):
    for path in (tmp_path, tmp_path / "none.png"):
        with pytest.raises(MediaError, match="image 1 of 1: cannot read"):
            processor(path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"patch_size": 0}, "media_proc_cfg.patch_size"),
        ({"merge_kernel_size": [2, 2]}, "media_proc_cfg.merge_kernel_size"),
        ({"in_patch_limit": 1.5}, "media_proc_cfg.in_patch_limit"),
        ({"image_mean": 0.5}, "media_proc_cfg.image_mean"),
        ({"image_std": [0.5, 0.5, 0.0]}, "media_proc_cfg.image_std"),
        ({"fixed_output_tokens": 64}, "media_proc_cfg.fixed_output_tokens"),
        ({"transparent_bg_fill_stage": "later"}, "media_proc_cfg.transparent_bg_fill_stage"),
        ({"transparent_bg_config": {"pattern": "stripes"}}, "transparent_bg_config.pattern"),
        ({"transparent_bg_config": {"chessboard_gray_value": 300}}, "chessboard_gray_value"),
        ({"transparent_bg_config": {"chessboard_square_size": 0}}, "chessboard_square_size"),
        ({"transparent_bg_config": "chess"}, "transparent_bg_config must be"),
    ],
    ids=str,
)
def test_wrong_settings_name_their_field(change, words):
    with pytest.raises(ConfigError, match=words):
        KimiK3VisionProcessor({**RELEASED_MEDIA_PROC_CFG, **change})


def test_a_setting_that_does_not_exist_is_an_error(processor):
    with pytest.raises(ConfigError, match="do_resize: not a setting"):
        processor(picture(), do_resize=False)


def test_released_file_round_trip(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(RELEASED_FILE))
    processor = KimiK3VisionProcessor.from_pretrained(tmp_path)
    processor.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
    assert written == {**RELEASED_FILE, "image_processor_type": "KimiK3VisionProcessor"}
    second = KimiK3VisionProcessor.from_pretrained(tmp_path / "again")
    assert second.to_dict() == processor.to_dict()
    assert second.patch_size == 14 and second.merge_size == 2


def test_options_are_written_only_when_they_differ(tmp_path):
    options = {"apply_exif_orientation": True, "max_image_pixels": None, "in_patch_limit": 400}
    KimiK3VisionProcessor(**options, processor_class="KimiK3Processor").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert written["apply_exif_orientation"] is True and written["max_image_pixels"] is None
    assert written["media_proc_cfg"]["in_patch_limit"] == 400 and written["processor_class"] == "KimiK3Processor"
    loaded = KimiK3VisionProcessor.from_pretrained(tmp_path, in_patch_limit=100)
    assert loaded.apply_exif_orientation and loaded.media_proc_cfg["in_patch_limit"] == 100
    assert loaded.max_image_pixels is None


class HolderConfig(PretrainedConfig):
    model_type = "kimi_image_processor_test"


def test_auto_class_finds_it_without_remote_code(tmp_path):
    AutoConfig.register(HolderConfig.model_type, HolderConfig, exist_ok=True)
    classes = {"pil": KimiK3VisionProcessor, "torchvision": KimiK3VisionProcessor}
    AutoImageProcessor.register(HolderConfig, image_processor_classes=classes, exist_ok=True)
    HolderConfig().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(RELEASED_FILE))
    for trust in (None, False, True):
        assert type(AutoImageProcessor.from_pretrained(tmp_path, trust_remote_code=trust)) is KimiK3VisionProcessor
    KimiK3VisionProcessor().save_pretrained(tmp_path)
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is KimiK3VisionProcessor


def test_import_without_pil_and_a_clear_error_on_use():
    code = """
import sys
class NoPil:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("PIL", "torchvision"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoPil())
from kimi_hf.processing.image_processing_kimi_k3 import KimiK3VisionProcessor
processor = KimiK3VisionProcessor()
print(processor.num_image_tokens(60, 45))
try:
    processor(b"x")
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0] == "6", done.stderr
    assert "MediaError" in done.stdout and "pip install 'kimi-hf[vision]'" in done.stdout


def test_load_images_flattens_and_counts():
    assert load_images(None) == []
    assert [image.size for image in load_images([[picture()], picture(size=(5, 6))])] == [(40, 30), (5, 6)]
