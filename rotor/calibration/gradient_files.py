"""States, gradients and sums of an unfinished gradient pass, kept in files so that a resumed run goes on with them.

`gradients.json` says what is done. It is written after the files that it speaks of are on disk.
"""

from __future__ import annotations

import time
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint.files import read_json, replacing, sync, write_json
from ..checkpoint.publishing import write_tensors
from ..models.layerwise import LayerwiseModel, new_states
from .gradient_sums import GradientSums

KEEP_SECONDS = 30.0
"""Seconds of work after which the sums of an unfinished layer are written again."""

DONE = "gradients.json"


class GradientFiles:
    """Sums that a gradient pass keeps until it is needed no more: in a folder, or without one in memory.

    entered: layers whose entering hidden states are computed; one more: also the states that leave the last layer.
    backward: layer by whose entering states the gradient is computed (the number of layers: by the states that leave
        the last), or None before the backward pass.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.entered = 0
        self.backward: int | None = None
        self._tensors: dict[str, Tensor] = {}
        self._kept = time.monotonic()
        if folder is not None and (folder / DONE).is_file():
            done = read_json(folder / DONE, "Give --overwrite to start again.")
            self.entered, self.backward = done["entered"], done["backward"]

    def units_left(self, num_layers: int) -> int:
        """Passes through a layer that are left, of three for each: one forward, and one backward, which takes two."""
        backward = num_layers if self.backward is None else self.backward
        forward = 0 if self.backward is not None else min(num_layers, num_layers + 1 - self.entered)
        return forward + 2 * backward

    def in_words(self) -> str:
        """Work that is done, in words; empty if that is nothing."""
        if self.backward is None:
            return f"hidden states of {self.entered - 1} layer(s) for gradients" if self.entered > 1 else ""
        part = self.folder is not None and (self.folder / _sums(self.backward - 1)).is_file()
        begun = f", and a part of those of layer {self.backward - 1}" if part else ""
        return f"gradients of the layers from {self.backward} on{begun}"

    def states(self, index: int, network: LayerwiseModel, sequences: Tensor) -> Tensor:
        """Hidden states that enter a layer, [n, seq_len, hidden_size]; new ones where they are not computed yet."""
        return self._tensor(_states(index), network, sequences)

    def gradient(self, index: int, network: LayerwiseModel, sequences: Tensor) -> Tensor:
        """Gradient of the loss by the hidden states that enter a layer; new, or unfinished, like `states`."""
        return self._tensor(_gradient(index), network, sequences)

    def _tensor(self, name: str, network: LayerwiseModel, sequences: Tensor) -> Tensor:
        if name not in self._tensors:
            shape = (*sequences.shape, network.shape.hidden_size)
            self._tensors[name] = (
                network.states_like(sequences)
                if self.folder is None
                else new_states(shape, network.dtype, self.folder / name)
            )
        return self._tensors[name]

    def has_entered(self, index: int) -> None:
        """The hidden states that enter layer `index` are computed."""
        self.entered = index + 1
        self._commit(_states(index))

    def has_gradient(self, index: int) -> None:
        """The gradient by the states that enter layer `index` is computed, and with it the information of the layer."""
        self.backward = index
        self._commit(_gradient(index))
        for name in (_states(index), _gradient(index + 1), _sums(index)):
            self._tensors.pop(name, None)
            if self.folder is not None:
                (self.folder / name).unlink(missing_ok=True)

    def load(self, index: int, sums: GradientSums, network: LayerwiseModel) -> None:
        """Give the new sums of layer `index` the batches of it that were kept."""
        if self.folder is not None and (self.folder / _sums(index)).is_file():
            sums.load(load_file(self.folder / _sums(index)), network.device)

    def keep(self, index: int, sums: GradientSums, now: bool = False) -> None:
        """Write the sums of layer `index` and the gradients of their batches, every KEEP_SECONDS or `now`."""
        if self.folder is None or not sums.batches or (not now and time.monotonic() - self._kept < KEEP_SECONDS):
            return
        sync(self.folder / _gradient(index))
        with replacing(self.folder / _sums(index)) as temporary:
            write_tensors(temporary, sums.to_tensors())
        self._kept = time.monotonic()

    def _commit(self, name: str) -> None:
        if self.folder is None:
            return
        sync(self.folder / name)
        sync(self.folder)
        write_json(self.folder / DONE, {"entered": self.entered, "backward": self.backward})


def _states(index: int) -> str:
    return f"entering-{index:04d}.bin"


def _gradient(index: int) -> str:
    return f"gradient-{index:04d}.bin"


def _sums(index: int) -> str:
    return f"sums-{index:04d}.safetensors"
