"""Reads files as samples of the dataset that a run was trained on: images, tensors, tables and
text."""

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from phasetrain.addons.deploy.predict.tables import read_rows
from phasetrain.config.addons import require_service
from phasetrain.data.datasets.images import EXTENSIONS, Mode, decode_image, import_pillow, to_tensor
from phasetrain.errors import ConfigError, did_you_mean, is_out_of_memory
from phasetrain.runtime.format import format_count

ARRAYS = (".npy", ".pt")
"""Extensions of files with tensors."""

TABLES = (".csv",)
"""Extensions of files with a row of numbers per sample."""

TEXTS = (".txt", ".text")
"""Extensions of files with text."""

TOKEN_DATASETS = ("text", "alice", "tokens")
"""Datasets of the add-on text, whose samples are blocks of tokens."""

STDIN = "-"
"""Stands for the lines of standard input."""

MAPPING_ADVICE = (
    "expected a .pt file of torch.save({NAME: tensor, ...}) with --arrays sample or --arrays "
    "batch, or of a list of such samples; or call phasetrain.load(RUN).predict({NAME: batch, ...}) "
    "in Python"
)
"""What to give to a model with several inputs."""

OF_FILES = ("predict.unreadable", "predict.unknown_kind")
"""Codes of errors about a single file, without which the others can be read."""

OnUnreadable = Callable[[str, str], None]
"""Receives the path and the error message of a file that is skipped."""

Arrays = Literal["auto", "sample", "batch"]
"""How an array in a file is read."""

T = TypeVar("T")


@dataclass(frozen=True)
class RawInput:
    """A sample before the transforms.

    Attributes:
        file: path of its file.
        index: position in the file.
        sample: as the dataset gives it.
    """

    file: str
    index: int
    sample: Any


@dataclass(frozen=True)
class InputReader:
    """Reads files as samples of a dataset.

    Attributes:
        section: config of the split whose dataset is imitated.
        facts: recorded facts about its data: `channels`, `context`, `input_columns`, `input_shape`,
            or else `sample_shape` and `sample_rank` of the first sample, see `sample_rank`.
        takes_numbers: whether a sample is known to be an array; otherwise `input_shape` tells.
        tokenizer: a `TextCodec` of the add-on text, if it is not in the folder of the dataset.
        arrays: whether an array in a file is a sample or a batch; `auto` decides by `sample_rank`.
    """

    section: Mapping[str, Any]
    facts: Mapping[str, Any]
    takes_numbers: bool = False
    tokenizer: Any = None
    arrays: Arrays = "auto"

    @property
    def sample_rank(self) -> int | None:
        """The number of dimensions of a sample; None if it is not known."""
        rank = self.facts.get("sample_rank")
        if isinstance(rank, int):
            return rank
        shape = self.facts.get("input_shape", self.facts.get("sample_shape"))
        if isinstance(shape, list):
            return len(shape)
        if self.is_text:
            return 1
        return 3 if "channels" in self.facts else None

    @property
    def is_text(self) -> bool:
        """Whether samples are blocks of tokens."""
        return self.section.get("dataset") in TOKEN_DATASETS

    @cached_property
    def codec(self) -> Any:
        """The tokenizer of the dataset, a `TextCodec` of the add-on text, if samples are blocks of
        tokens.

        Raises:
            ConfigError: the folder of the dataset or the add-on is not there.
        """
        if self.tokenizer is not None:
            return self.tokenizer
        open_codec = require_service("open_dataset_codec", "text", "a text as a sample")
        return open_codec(self.section)

    def name_token(self, token: int) -> str:
        """Return the text of a token, quoted, or `end` for the end of a document."""
        if token == self.codec.end:
            return "end"
        return repr(self.codec.decode([token]))

    def read(self, paths: Sequence[str]) -> list[RawInput]:
        """Return the samples in files, see `iterate`."""
        return list(self.iterate(paths))

    def iterate(
        self, paths: Sequence[str], on_unreadable: OnUnreadable | None = None
    ) -> Iterator[RawInput]:
        """Yield the samples in files, each file read when it is its turn.

        Args:
            paths: files; a folder means the images and tensors in it, `-` the lines of standard
                input, each a sample: a text, or numbers with commas between them.
            on_unreadable: called for each file that cannot be read, which is then skipped.

        Raises:
            ConfigError: a file does not exist, is of no known kind, or cannot be read, and
                `on_unreadable` is None.
        """
        files = [file for path in paths for file in _read_or_skip(_list_files, path, on_unreadable)]
        if on_unreadable is None:
            for file in files:
                _check_exists(file)  # of all files, before minutes are spent on the first ones
        for file in files:
            samples = _read_or_skip(self._read_samples, file, on_unreadable)
            for index, sample in enumerate(samples):
                yield RawInput(file, index, sample)

    def _read_samples(self, file: str) -> Sequence[Any]:
        if file == STDIN:
            return self.read_lines(sys.stdin.read().splitlines())
        _check_exists(file)
        return self._read_file(file)

    def read_lines(self, lines: Sequence[str], name: str = STDIN) -> Sequence[Any]:
        """Return a sample per line of text.

        Args:
            lines: without their ends; empty ones are left out.
            name: where they come from, for messages.

        Raises:
            ConfigError: the dataset has no text and no rows of numbers.
        """
        kept = [line for line in lines if line]
        if self.is_text:
            return [self._read_tokens(line.encode(errors="surrogateescape")) for line in kept]
        if "channels" in self.facts:
            raise ConfigError(
                f"{name}: samples of the dataset {self.section.get('dataset')!r} are images, and "
                "these are lines of text; expected files",
                code="predict.unknown_kind",
            )
        if self.takes_numbers or self.sample_rank is not None:
            try:
                return read_rows(kept, name, self.facts.get("input_columns") or ())
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(
                    f"{name}: cannot be read: {error}", code="predict.unreadable"
                ) from error
        return kept

    def read_named(self, inputs: Any, *, are_texts_paths: bool) -> list[Any]:
        """Return the samples of paths or of images of Pillow; empty for inputs that are samples.

        Args:
            inputs: a path, an image or a list of them; or anything else.
            are_texts_paths: whether a text is a path; otherwise it is a sample.

        Raises:
            ConfigError: a file cannot be read, or the samples of the dataset are not images.
        """
        items = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        # Who has an image has imported Pillow, which is optional.
        module = sys.modules.get("PIL.Image")
        if module is not None and items and all(isinstance(item, module.Image) for item in items):
            return [self._read_picture(item) for item in items]
        kinds: tuple[type, ...] = (str, Path) if are_texts_paths else (Path,)
        if all(isinstance(item, kinds) for item in items):
            return [raw_input.sample for raw_input in self.read([str(item) for item in items])]
        return []

    def _read_picture(self, picture: Any) -> Tensor:
        """Return an image of Pillow as a sample.

        Raises:
            ConfigError: the samples of the dataset are not images, or its mode has no white level.
        """
        if self.is_text or "channels" not in self.facts:
            raise ConfigError(
                f"inputs of type {type(picture).__name__}: the dataset "
                f"{self.section.get('dataset')!r} does not report images (the fact `channels`); "
                "expected tensors or arrays, prepared as the dataset does it",
                code="predict.wrong_type",
            )
        try:
            return to_tensor(picture, self._find_mode(), self._find_size())
        except ValueError as error:
            raise ConfigError(f"an image: {error}", code="predict.unreadable") from error

    def _read_file(self, file: str) -> Sequence[Any]:
        suffix = Path(file).suffix.lower()
        try:
            if suffix in ARRAYS:
                return self._split_content(file, _read_array(file))
            self._reject_single_input(file)
            if suffix in EXTENSIONS and not self.is_text:
                return [self._read_image(file)]
            if self.is_text:
                return [self._read_tokens(Path(file).read_bytes())]
            if suffix in TABLES and "channels" not in self.facts:
                # Spreadsheets write a byte order mark, which is no part of the first name.
                lines = Path(file).read_text("utf-8-sig").splitlines()
                return read_rows(lines, file, self.facts.get("input_columns") or ())
            if suffix in TEXTS and "channels" not in self.facts:
                return Path(file).read_text().splitlines()
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError, EOFError) as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{file}: cannot be read: {error}; `phasetrain predict --skip-unreadable` leaves "
                "such files out",
                code="predict.unreadable",
            ) from error
        endings = [*EXTENSIONS, *ARRAYS]
        if "channels" not in self.facts:
            endings += [*TABLES, *TEXTS]
        raise ConfigError(
            f"{file}: no file for the dataset {self.section.get('dataset')!r} of the run; expected "
            f"one of {', '.join(endings)}",
            code="predict.unknown_kind",
        )

    def _read_image(self, file: str) -> Tensor:
        import_pillow("predict")
        return decode_image(file, self._find_mode(), self._find_size())

    def _find_mode(self) -> Mode:
        mode: Mode = "RGB"
        # Datasets without a mode, such as idx, have the channels of their files.
        if self.section.get("mode") == "L" or (
            "mode" not in self.section and self.facts.get("channels") == 1
        ):
            mode = "L"
        return mode

    def _find_size(self) -> int | None:
        size = self.section.get("size")
        if isinstance(size, int):
            return size
        return None  # the parameter of another dataset

    def _read_tokens(self, content: bytes) -> Tensor:
        """Return the last tokens of a text, which predict the next one."""
        tokens = torch.from_numpy(self.codec.encode([content])[0])
        context = self.facts.get("context")
        if not len(tokens):
            raise ValueError("it is empty")
        if isinstance(context, int):
            tokens = tokens[-context:]  # the model has no positions for more
        return tokens

    @property
    def _names(self) -> Sequence[str]:
        """The names of the entries of a sample that is a mapping, if the config selects them."""
        names = self.section.get("inputs")
        if isinstance(names, Sequence) and not isinstance(names, str):
            return [name for name in names if isinstance(name, str)]
        return []

    def _reject_single_input(self, file: str) -> None:
        """Reject a file with one value per sample if samples are mappings."""
        if self._names:
            raise ConfigError(
                f"{file}: a sample of the run is a mapping of {', '.join(self._names)} "
                f"(DATA.*.inputs); {MAPPING_ADVICE}",
                code="predict.wrong_type",
            )

    def _split_content(self, file: str, content: Any) -> Sequence[Any]:
        if isinstance(content, list) and isinstance(content[0], Tensor):
            self._reject_single_input(file)
            rank = self.sample_rank
            for number, sample in enumerate(content):
                if rank is not None and sample.ndim != rank:
                    raise ConfigError(
                        f"{file}: entry {number} of its list has the shape {tuple(sample.shape)}, "
                        f"and a sample of the run has {format_count(rank, 'dimension')}; expected "
                        "a list of samples",
                        code="predict.wrong_shape",
                    )
            return content
        if isinstance(content, Tensor):
            self._reject_single_input(file)
            return self._split_array(file, content)
        return self._split_mapping(file, content)

    def _split_mapping(
        self, file: str, content: Mapping[str, Tensor] | list[Mapping[str, Tensor]]
    ) -> Sequence[Mapping[str, Tensor]]:
        """Return the samples in a mapping: one, or several along the first dimension; or those of a
        list of mappings."""
        samples = content if isinstance(content, list) else [content]
        names = self._names or [*samples[0]]
        for sample in samples:
            if missing := [name for name in names if name not in sample]:
                raise ConfigError(
                    f"{file}: its mapping lacks {', '.join(missing)}; {MAPPING_ADVICE}",
                    code="predict.wrong_type",
                )
        samples = [{name: sample[name] for name in names} for sample in samples]
        if isinstance(content, list) or self.arrays == "sample":
            return samples
        if self.arrays == "auto":
            raise ConfigError(
                f"{file}: a mapping may be a sample or a batch; say which with --arrays sample or "
                "--arrays batch of phasetrain predict",
                code="predict.ambiguous",
            )
        columns = samples[0].values()
        if len({len(column) if column.ndim else 0 for column in columns}) != 1:
            raise ValueError("its tensors differ in their first dimension, the number of samples")
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _split_array(self, file: str, values: Tensor) -> Sequence[Tensor]:
        """Return the samples of an array: one, or several along the first dimension."""
        if values.dtype == torch.float64:
            values = values.float()
        is_image = "channels" in self.facts and not self.is_text
        if is_image and not values.is_floating_point() and values.dtype != torch.uint8:
            dtype = str(values.dtype).removeprefix("torch.")
            # Transforms such as normalize would take them, and the model has not seen their range.
            raise ValueError(
                f"its numbers are {dtype}; expected an image of float32 as the dataset gives it, "
                "or of uint8 in [0, 255]: convert it with array.astype"
            )
        rank = self.sample_rank
        if self.arrays == "sample" or (self.arrays == "auto" and values.ndim == rank):
            return [values]
        if not values.ndim:
            raise ValueError("it is a single number, expected a sample or a batch of samples")
        if self.arrays == "batch" or values.ndim - 1 == rank:
            return list(values)
        if rank is None:
            # Samples that are single numbers are rare.
            if values.ndim == 1:
                return [values]
            raise ConfigError(
                f"{file}: its shape is {tuple(values.shape)}, and the run has not recorded the "
                "number of dimensions of a sample: it may be a sample or a batch; say which with "
                "--arrays sample or --arrays batch of phasetrain predict; in Python, give "
                "task.predict the batch itself",
                code="predict.ambiguous",
            )
        raise ConfigError(
            f"{file}: its shape is {tuple(values.shape)}, and a sample of the run has "
            f"{format_count(rank, 'dimension')}; expected {rank} for a sample or {rank + 1} for a "
            "batch, or --arrays sample or batch",
            code="predict.wrong_shape",
        )


def _read_or_skip(
    read: Callable[[str], Sequence[T]], path: str, on_unreadable: OnUnreadable | None
) -> Sequence[T]:
    """Return the result of `read` for a path; nothing if it fails and the path may be skipped."""
    try:
        return read(path)
    except ConfigError as error:
        if on_unreadable is None or error.code not in OF_FILES:
            raise
        on_unreadable(path, str(error))
        return []


def _check_exists(file: str) -> None:
    if file == STDIN:
        return
    if Path(file).is_dir():
        raise ConfigError(f"{file}: this is a folder; expected files", code="predict.unreadable")
    if not Path(file).exists():
        near = did_you_mean(Path(file).name, sorted(_list_siblings(file))) or "."
        raise ConfigError(f"{file}: there is no such file{near}", code="predict.unreadable")


def _list_files(path: str) -> list[str]:
    if path == STDIN or not Path(path).is_dir():
        return [path]
    files = sorted(
        str(file) for file in Path(path).rglob("*") if file.suffix.lower() in (*EXTENSIONS, *ARRAYS)
    )
    if not files:
        raise ConfigError(
            f"{path}: there is no image and no tensor in this folder", code="predict.unreadable"
        )
    return files


def _read_array(file: str) -> Any:
    """Return a tensor, or from a `.pt` file also a mapping of tensors, or a list of tensors or of
    mappings."""
    content = Path(file).read_bytes()
    # Both without pickle, because a pickled object could execute code.
    if file.lower().endswith(".npy"):
        return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))
    try:
        array = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # torch's message recommends to load the file without this protection
        raise ValueError("it is not a file of torch.save with a tensor") from error
    samples = array if isinstance(array, list) else [array]
    are_tensors = all(isinstance(sample, Tensor) for sample in samples)
    if not samples or not (are_tensors or all(map(_is_mapping, samples))):
        raise ValueError(
            f"it contains {type(array).__name__}, expected a tensor, a mapping of tensors, or a "
            "list of tensors or of such mappings, with an entry per sample"
        )
    return array


def _is_mapping(sample: Any) -> bool:
    if not isinstance(sample, Mapping) or not sample:
        return False
    return all(isinstance(value, Tensor) for value in sample.values())


def _list_siblings(file: str) -> list[str]:
    parent = Path(file).parent
    if parent.is_dir():
        return [path.name for path in parent.iterdir() if path.is_file()]
    return []
