"""The text that the demo learns: the Python standard library's own sources, or a file of yours."""

from __future__ import annotations

import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

#: Number of different characters that the model knows. Fixed, so that every text gives the same
#: model and so the same number of bytes; index 0 stands for all characters rarer than those.
ALPHABET = 128
_MAX_CHARACTERS = 6_000_000
# Validation takes every 16th stretch of this length, so that it is drawn from the whole text.
_STRETCH = 32 * 1024
_HELD_OUT = 16

Characters = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """A text as character indices, split for training and validation.

    Attributes:
        train, validation: 1-D arrays of indices below ALPHABET.
        origin: what the text is, for people.
    """

    train: Characters
    validation: Characters
    origin: str

    def save(self, path: Path) -> None:
        """Write the two arrays to an .npz file."""
        np.savez(path, train=self.train, validation=self.validation)


def load_corpus(path: Path) -> tuple[Characters, Characters]:
    """(train, validation) as :meth:`Corpus.save` wrote them."""
    with np.load(path) as arrays:
        return arrays["train"], arrays["validation"]


def read_corpus(path: Path | None = None) -> Corpus:
    """The text of ``path``, or else the modules of the standard library in alphabetical order.

    Raises OSError when the text cannot be read, ValueError when it is too short to learn from.
    """
    if path is not None:
        text, origin = path.read_text(encoding="utf-8", errors="replace"), str(path)
    else:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"), key=lambda file: file.name)
        text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        origin = f"{len(files)} modules of the Python standard library"
    text = text[:_MAX_CHARACTERS]
    if len(text) < _HELD_OUT * _STRETCH:
        raise ValueError(
            f"{origin}: {len(text)} characters are too few, {_HELD_OUT * _STRETCH} are needed"
        )
    return _split(_encode(text), origin)


def _encode(text: str) -> Characters:
    """Indices of the characters, the most frequent first; ties by code point."""
    ranking = sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))
    table = {ord(char): chr(i + 1) for i, (char, _) in enumerate(ranking[: ALPHABET - 1])}
    rare = {ord(char): "\0" for char, _ in ranking[ALPHABET - 1 :]}
    return np.frombuffer(text.translate(table | rare).encode("latin-1"), dtype=np.uint8)


def _split(indices: Characters, origin: str) -> Corpus:
    stretches = np.split(indices, range(_STRETCH, len(indices), _STRETCH))
    train = [piece for i, piece in enumerate(stretches) if i % _HELD_OUT != _HELD_OUT - 1]
    return Corpus(
        train=np.concatenate(train),
        validation=np.concatenate(stretches[_HELD_OUT - 1 :: _HELD_OUT]),
        origin=origin,
    )
