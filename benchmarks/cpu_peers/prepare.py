"""Our checkpoint's weights in the files that peers read, made once and kept beside their environment.

python -m cpu_peers.prepare WHAT MODELS, where WHAT is one of the names in MAKERS
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

INT4_GROUP = 64  # hidden size 576 is no multiple of the usual 128


def gguf_file(out: Path, models: Path) -> None:
    """The file that we read ourselves, under a name that peers find; no copy."""
    from draftwood.model.store import fetch

    out.symlink_to(fetch("smollm2").resolve())


def hugging_face(out: Path, models: Path) -> None:
    """A folder that transformers opens, in float32."""
    from draftwood.model.checkpoint import open_checkpoint
    from peers import transformers_model

    transformers_model(open_checkpoint("smollm2")).save_pretrained(out)


def openvino_float32(out: Path, models: Path) -> None:
    """The Hugging Face folder as a stateful OpenVINO model."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    main_export(
        str(models / "hugging-face"),
        str(out),
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp32"),
        convert_tokenizer=False,
        stateful=True,
    )


def openvino_compressed(form: str) -> Callable[[Path, Path], None]:
    """The float32 model with 8- or 4-bit matrices; embedding and head have 8 bits in both, as in ours."""

    def make(out: Path, models: Path) -> None:
        import nncf
        import openvino

        modes = nncf.CompressWeightsMode
        options = {
            "int8": {"mode": modes.INT8_ASYM},
            "int4": {"mode": modes.INT4_SYM, "group_size": INT4_GROUP, "ratio": 1.0},
        }
        exact = models / "openvino-float32"
        model = openvino.Core().read_model(str(exact / "openvino_model.xml"))
        out.mkdir()
        openvino.save_model(
            nncf.compress_weights(model, **options[form]), str(out / "openvino_model.xml"), compress_to_fp16=False
        )
        for name in ("config.json", "generation_config.json"):
            shutil.copy(exact / name, out)

    return make


def requantised(type_name: str) -> Callable[[Path, Path], None]:
    """The GGUF file with its matrices in another type."""

    def make(out: Path, models: Path) -> None:
        import llama_cpp

        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = getattr(llama_cpp, type_name)
        options.allow_requantize = True
        source = str(models / "q4_1.gguf").encode()
        if llama_cpp.llama_model_quantize(source, str(out).encode(), options):
            raise RuntimeError(f"llama.cpp could not write {type_name}")

    return make


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "q4_1.gguf": gguf_file,
    "hugging-face": hugging_face,
    "f32.gguf": requantised("LLAMA_FTYPE_ALL_F32"),
    "q8_0.gguf": requantised("LLAMA_FTYPE_MOSTLY_Q8_0"),
    "openvino-float32": openvino_float32,
    "openvino-int8": openvino_compressed("int8"),
    "openvino-int4": openvino_compressed("int4"),
}
NEEDED_FIRST = {  # and the first two are made in our environment, all others in the peers'
    "f32.gguf": "q4_1.gguf",
    "q8_0.gguf": "q4_1.gguf",
    "openvino-float32": "hugging-face",
    "openvino-int8": "openvino-float32",
    "openvino-int4": "openvino-float32",
}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    what, models = sys.argv[1], Path(sys.argv[2])
    out, unfinished = models / what, models / f"unfinished-{what}"
    remove(out)
    remove(unfinished)
    MAKERS[what](unfinished, models)
    unfinished.rename(out)  # so that what has its name is whole


if __name__ == "__main__":
    main()
