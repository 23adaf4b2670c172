"""The compiled half."""

import datetime
from collections.abc import Sequence
from typing import NoReturn, TypedDict

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import Store

built_for_torch: str
pybind11_internals_version: int

class TransportError(dist.DistBackendError):
    peer: int

class WireBytes(TypedDict):
    within_node: int
    across_nodes: int

class CollectiveStats(TypedDict):
    calls: int
    payload_bytes: int
    wire_bytes: WireBytes
    fallbacks: dict[str, int]
    nonfinite_blocks: int
    encode_seconds: float
    decode_seconds: float
    wait_seconds: float

class Hop(TypedDict):
    level: str
    codec: str
    ranks: int

class PredictedMicroseconds(TypedDict):
    exact: float | None
    coded: float | None

class Plan(TypedDict):
    algorithm: str
    topology: str
    hops: list[Hop]
    exact_because: str
    payload_bytes: int
    wire_bytes: WireBytes
    node_across_nodes_bytes: int
    chunk_elements: int
    slots: int
    predicted_us: PredictedMicroseconds | None
    not_in_shared_memory: dict[int, str]

class OperationRecord(TypedDict):
    number: int
    call: str
    state: str
    queued: float
    started: float | None
    ended: float | None

class FlightRecord(TypedDict):
    rank: int
    size: int
    label: str
    topology: str
    failure: str
    waits_for: str
    operations: list[OperationRecord]
    messages: list[OperationRecord]

class Options(_Backend.Options):
    given: dict[str, str]
    _timeout: datetime.timedelta
    def __init__(self) -> None: ...
    def set(self, key: str, value: str) -> None: ...
    def copy(self) -> Options: ...

class ThreadPolicy:
    def with_exact(self) -> ThreadPolicy: ...
    def with_settings(self, settings: dict[str, str]) -> ThreadPolicy: ...
    @staticmethod
    def current() -> ThreadPolicy: ...
    def apply(self) -> None: ...

class CodecTimer:
    def __init__(self, source: torch.Tensor, output: torch.Tensor) -> None: ...
    def copy(self, repeats: int) -> float: ...
    def add(self, repeats: int) -> float: ...
    def encode(self, row: str, codec: str, repeats: int) -> float: ...
    def decode(self, row: str, codec: str, repeats: int) -> float: ...
    def decode_add(self, row: str, codec: str, repeats: int) -> float: ...
    def requantize(self, row: str, codec: str, repeats: int) -> float: ...

class Backend(_Backend):
    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: Options,
    ) -> None: ...
    @property
    def group_number(self) -> int: ...
    @property
    def may_delegate(self) -> bool: ...
    def meet(self) -> None: ...
    def set_delegate(self, delegate: _Backend, ports: Sequence[int]) -> None: ...
    def fail_without_delegate(self, reason: str) -> NoReturn: ...
    def all_gather_with(
        self, output: torch.Tensor, input: torch.Tensor, codec: str | None, async_op: bool
    ) -> dist.Work: ...
    def reduce_scatter_with(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: dist.ReduceOp,
        codec: str | None,
        async_op: bool,
    ) -> dist.Work: ...
    def all_reduce_with(
        self, tensor: torch.Tensor, op: dist.ReduceOp, codec: str | None, async_op: bool
    ) -> dist.Work: ...
    def all_to_all_with(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        codec: str | None,
        async_op: bool,
    ) -> dist.Work: ...
    def explain(
        self, verb: str, numel: int, dtype: torch.dtype, op: dist.ReduceOp, codec: str | None
    ) -> Plan: ...
    def stats(self) -> dict[str, CollectiveStats]: ...
    def reset_stats(self) -> None: ...
    def flight_record(self) -> FlightRecord: ...
    def describe(self) -> dict[str, object]: ...

def encode(tensor: torch.Tensor, codec: str) -> torch.Tensor: ...
def decode(
    bytes: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, codec: str
) -> torch.Tensor: ...
def isa() -> str: ...
def isa_rows() -> list[str]: ...
def refuse_to_join(store: Store, rank: int, reason: str) -> None: ...
def local_addresses() -> list[str]: ...
def listening_ports() -> list[int]: ...
def shutdown_all(grace: datetime.timedelta) -> None: ...
