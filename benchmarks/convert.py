"""Convert a checkpoint for a peer that cannot read it directly.

    python benchmarks/convert.py ctranslate2 FOLDER OUT   # needs torch, transformers, ctranslate2
    python benchmarks/convert.py llama.cpp FOLDER OUT     # needs gguf and safetensors
    python benchmarks/convert.py openvino FOLDER OUT      # needs optimum-intel[openvino]

FOLDER has config.json, one model.safetensors and a tokenizer (vocab.json, merges.txt). Weights stay
float32. With --dtype int8, llama.cpp's matrices become Q8_0 and OpenVINO's int8; CTranslate2
quantizes when it loads.
"""

import argparse
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"


def to_ctranslate2(folder: Path, out: Path, dtype: str) -> None:
    """Write a folder for CTranslate2."""
    import ctranslate2

    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(out))


def to_gguf(folder: Path, out: Path, dtype: str) -> None:
    """Write a GGUF file for llama.cpp, with the layers' matrices transposed to (n_out, n_in)."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    layers = config["n_layer"]
    writer = gguf.GGUFWriter(out, "gpt2")
    writer.add_block_count(layers)
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_Q8_0 if dtype == "int8" else gguf.LlamaFileType.ALL_F32
    )

    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    tokens = sorted(ids, key=ids.__getitem__)
    tokens += [f"<unused {id}>" for id in range(len(tokens), config["vocab_size"])]
    merges = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(ids) - 1)
    writer.add_bos_token_id(len(ids) - 1)
    writer.add_add_bos_token(False)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("transformer.")
        theirs = names.get_name(f"transformer.{name}", try_suffixes=(".weight", ".bias"))
        if theirs is None or name.endswith(".attn.bias"):  # a stored causal mask
            continue
        is_layer_matrix = tensor.ndim == 2 and name.startswith("h.")
        tensor = np.ascontiguousarray(tensor.T if is_layer_matrix else tensor)
        if dtype == "int8" and tensor.ndim == 2 and name != "wpe.weight":
            writer.add_tensor(theirs, gguf.quants.quantize(tensor, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(theirs, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_openvino(folder: Path, out: Path, dtype: str) -> None:
    """Write a folder for OpenVINO."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    # By default it quantizes large models to int8.
    how = {"load_in_8bit": False}
    if dtype == "int8":
        how = {"quantization_config": OVWeightQuantizationConfig(bits=8, sym=True)}
    OVModelForCausalLM.from_pretrained(folder, export=True, **how).save_pretrained(out)


CONVERSIONS = {"ctranslate2": to_ctranslate2, "llama.cpp": to_gguf, "openvino": to_openvino}


def main() -> None:
    """Convert one checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=CONVERSIONS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "int8"), default="float32")
    arguments = parser.parse_args()
    CONVERSIONS[arguments.peer](arguments.folder, arguments.out, arguments.dtype)


if __name__ == "__main__":
    main()
