"""A model's values on the ranks: where each comes from, how a rank takes its part, and how they are given back.

A value is the model's own, or it is read from weights, or, where the model is on meta, drawn by its modules (see
`initialise`). What is not the model's own is put into a stage after it is lowered and sharded on meta: a rank
holds no more than its part and one tensor (weights), or one module (drawn).
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.errors import ModelError, PlanError, PlannerError, RunError
from planner.graph import Graph, reads
from planner.plan import Plan
from planner.runtime.execute import Engine, Owned, stage_positions, stages_of_parameters
from planner.runtime.initialise import Init, Initialiser, named_tensors, uninitialised
from planner.runtime.parts import TensorParallel, parts_of, whole
from planner.runtime.weight_files import (
    Entry,
    FilePlan,
    GivenWeights,
    StoredWeights,
    Where,
    check_fit,
    digest_of,
    header_of,
    index_of,
    num_bytes,
    open_weights,
    raw,
    removed_on_failure,
)
from planner.runtime.zero import local, master_dtype
from planner.shard.placement import R

_log = logging.getLogger(__name__)
DEFAULT_SHARD_BYTES = 5 * 10**9  # of a file; what Hugging Face writes


class Values:
    """Where the value of every parameter and buffer of a model comes from, by name."""

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: GivenWeights | None = None,
        seed: int = 0,
        init: Init | None = None,
        device: torch.device,
    ) -> None:
        """`weights` win over the model's own values; what is on meta after that is drawn on `device`.

        Raises:
            ModelError: the weights do not fit, or the model cannot be initialised.
        """
        self._tensors = dict(named_tensors(model))
        self._position = {name: index for index, name in enumerate(self._tensors)}
        self._weights: StoredWeights | None = None
        self._stored: dict[str, tuple[str, ...]] = {}
        self._drawn: Initialiser | None = None
        self._seed = f"{seed} {init is not None}"
        self._missing: set[str] = set()
        if weights is not None:
            self._weights, self._stored = check_weights(model, weights)
        if any(tensor.is_meta and name not in self._stored for name, tensor in self._tensors.items()):
            _log.info("what is on meta is drawn module by module from seed %d, not as the constructor would", seed)
            self._drawn = Initialiser(model, seed=seed, init=init, device=device)

    @property
    def bytes_read(self) -> int:
        """From the given weights, so far, on this rank."""
        return 0 if self._weights is None else self._weights.bytes_read

    def is_own(self, name: str) -> bool:
        """Whether the model holds the value itself."""
        return name not in self._stored and not self._tensors[name].is_meta

    def ndim(self, name: str) -> int:
        """Dims in the model."""
        return self._tensors[name].ndim

    def position(self, name: str) -> int:
        """Place in the model: tensors of one module are neighbours, which draws each module once."""
        return self._position[name]

    def read(self, name: str, where: Where = ()) -> torch.Tensor:
        """The part `where` of a value, `()` for all of it; it may be a view.

        What nothing initialises is zero here; `refuse_missing` must be asked before the values are used.

        Raises:
            ModelError: a file cannot be read, an initialisation fails, or tied tensors were stored with two values.
        """
        if self.is_own(name):
            return self._tensors[name].detach()[where]
        if name in self._stored:
            assert self._weights is not None
            first, *others = self._stored[name]
            value = self._weights.read(first, where)
            for other in others:
                if not torch.equal(value, self._weights.read(other, where)):
                    raise ModelError(
                        f"{first} and {other} are one tensor of the model and differ in {self._weights.place}; remove "
                        "one from the weights, or untie them in the model"
                    )
            return value
        assert self._drawn is not None
        drawn = self._drawn.tensor(name)
        if drawn is None:
            self._missing.add(name)
            return torch.zeros_like(self._tensors[name], device="cpu").detach()[where]
        return drawn[where]

    def buffer(self, name: str, device: torch.device, parallel: TensorParallel | None = None) -> torch.Tensor:
        """A buffer on `device`: the model's own object if it is there already; of one that is split, this rank's part.

        Raises:
            PlanError: the placement does not fit.
        """
        own = self._tensors[name]
        if parallel is not None and parallel.of(name).is_split:
            parallel.check(name, own.shape)
            return parallel.cut(name, self.read(name)).to(device, own.dtype)
        if own.is_meta:
            return self.read(name).to(device, copy=True)
        value = own.to(device)
        if not self.is_own(name):
            value.copy_(self.read(name))
        return value

    def refuse_missing(self) -> None:
        """Refuse, on all ranks alike, what nothing initialises; a collective.

        Raises:
            ModelError: with the names that any rank asked for.
        """
        if self._drawn is not None:
            self._drawn.forget()
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, sorted(self._missing))
        names = sorted({name for names in everywhere for name in names}, key=self.position)
        if names:
            raise ModelError(uninitialised(names))

    def check_equal_everywhere(self) -> None:
        """Refuse values that differ between ranks; a collective.

        Raises:
            PlanError: with the first that differs.
        """
        if dist.get_world_size() == 1:
            return
        digests = [
            (name, digest_of(tensor) if self.is_own(name) else f"{tuple(tensor.shape)} {tensor.dtype}")
            for name, tensor in self._tensors.items()
        ]
        if self._weights is not None:
            digests.append(("the given weights", self._weights.digest()))
        if self._drawn is not None:
            digests.append(("the seed or init", self._seed))
        _refuse_unequal(digests)


def check_weights(model: nn.Module, weights: GivenWeights) -> tuple[StoredWeights, dict[str, tuple[str, ...]]]:
    """Open weights and compare names, shapes and dtypes with the model, which may be on meta; no value is read.

    Returns:
        The weights, and for each of the model's tensors the names under which they hold it.

    Raises:
        ModelError: they are not the weights of this model.
    """
    opened = open_weights(weights)
    # Hugging Face's list of what checkpoints may hold beside the model's own
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return opened, check_fit(opened, _in_state_dict(model), tuple(ignored))


def _in_state_dict(model: nn.Module) -> dict[str, tuple[tuple[str, ...], torch.Tensor]]:
    """Name of each parameter and persistent buffer -> its names in the state_dict, and itself."""
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    result: dict[str, tuple[tuple[str, ...], torch.Tensor]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in names:
            name = names[id(value)]
            result[name] = ((*result.get(name, ((), value))[0], key), value)
    return result


@contextmanager
def together() -> Iterator[None]:
    """What fails inside on any rank fails on all, with one sentence; a collective when it ends.

    Raises:
        PlannerError: of the lowest rank that failed, of its class.
    """
    failure: PlannerError | None = None
    try:
        yield
    except PlannerError as error:
        failure = error
    except OSError as error:
        failure = RunError(f"{type(error).__name__}: {error}")
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else (type(failure), str(failure)))
    failed = [rank for rank, found in enumerate(failures) if found is not None]
    if failed:
        kind, sentence = failures[failed[0]]
        alike = len(failed) == len(failures) and all(found[1] == sentence for found in failures)
        raise kind(sentence if alike else f"rank {failed[0]}: {sentence}") from failure


def _refuse_unequal(digests: list[tuple[str, str]]) -> None:
    everything = hashlib.sha256(repr(digests).encode()).hexdigest()
    totals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(totals, everything)
    if len(set(totals)) == 1:
        return
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, digests)
    for rank, other in enumerate(lists):
        for (name, one), (other_name, two) in zip(lists[0], other, strict=False):
            if (name, one) != (other_name, two):
                raise PlanError(
                    f"{name} of rank 0 and {other_name} of rank {rank} differ; build the model "
                    "from the same seed, or load the same weights, on every rank"
                )
    raise PlanError("the ranks have models with different numbers of parameters")


def check_parameters(model: nn.Module, graph: Graph) -> None:
    """Refuse a model that is not the traced one."""
    found = dict[str, torch.Tensor](model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
    for tensor in graph.tensors:
        if tensor.kind not in ("parameter", "buffer"):
            continue
        if tensor.name not in found:
            raise PlanError(f"the model has no {tensor.kind} {tensor.name}, the traced one has")
        shape = tuple(found[tensor.name].shape)
        if shape != tensor.shape:
            raise PlanError(f"{tensor.name} has shape {list(shape)}, in the traced model {list(tensor.shape)}")
        if tensor.kind == "parameter" and found[tensor.name].requires_grad != tensor.requires_grad:
            raise PlanError(
                f"{tensor.name} is {'trained' if tensor.requires_grad else 'frozen'} in the traced "
                "model and not in this one; trace again"
            )


def check_attributes(model: nn.Module) -> None:
    """Refuse plain attributes on meta: nothing initialises them, and no weights hold them.

    Raises:
        ModelError: with the first.
    """
    for path, module in model.named_modules():
        for leaf, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ModelError(
                    f"{f'{path}.{leaf}' if path else leaf} is a tensor on meta that is no parameter and no buffer, and "
                    "has no value; register it as a buffer, or build the model on the CPU"
                )


def take(
    model: nn.Module, plan: Plan, graph: Graph, index: int, device: torch.device, *, values: Values, wrapped: bool,
    parallel: TensorParallel | None = None,
) -> Mapping[int, torch.Tensor]:  # fmt: skip
    """Parameters of this rank's stage and, made when first asked for, buffers, by tensor index.

    The model's own objects where device, dtype and layout are right already; what has no value yet is on meta, for
    `fill`. Buffers are on `device`, with their values. With `parallel` all parameters are DTensors on its axis, and
    buffers are this rank's part.

    Raises:
        PlanError: a placement does not fit.
        ModelError: as `Values.read`.
    """
    parameters = dict(model.named_parameters())
    dtype = master_dtype(plan.precision)
    mine = {t for p in stage_positions(plan)[index] for t in graph.blocks[p].parameters}
    taken = {
        t: _as_stored(
            graph.tensors[t].name, parameters[graph.tensors[t].name], dtype, device, wrapped=wrapped, parallel=parallel
        )
        for t in sorted(mine)
        if graph.tensors[t].kind == "parameter"
    }
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    aliases = {name: names[id(buffer)] for name, buffer in model.named_buffers(remove_duplicate=False)}
    buffers = {t: aliases[described.name] for t, described in enumerate(graph.tensors) if described.kind == "buffer"}
    result = _Taken(taken, buffers, values, device, parallel)
    read = {t for p in stage_positions(plan)[index] for t in graph.blocks[p].buffers}
    read_whole = {t for n in graph.prelude.nodes for t in reads(graph.nodes[n])}
    for tensor in sorted(read_whole & buffers.keys()):
        if parallel is not None and parallel.of(buffers[tensor]).is_split:
            raise PlanError(f"the plan splits {buffers[tensor]}, which every stage reads whole; plan again")
    for tensor in sorted((read | read_whole) & buffers.keys()):  # here a failure can still be told to all ranks
        result[tensor]
    return result


class _Taken(Mapping[int, torch.Tensor]):
    """The tensors of a stage; a buffer that no block of it reads is never made."""

    def __init__(
        self, parameters: dict[int, nn.Parameter], buffers: dict[int, str], values: Values, device: torch.device,
        parallel: TensorParallel | None,
    ) -> None:  # fmt: skip
        self._made: dict[int, torch.Tensor] = dict(parameters)
        self._buffers = buffers
        self._values = values
        self._device = device
        self._parallel = parallel
        self._by_name: dict[str, torch.Tensor] = {}

    def __getitem__(self, tensor: int) -> torch.Tensor:
        if tensor not in self._made:
            name = self._buffers[tensor]
            if name not in self._by_name:
                self._by_name[name] = self._values.buffer(name, self._device, self._parallel)
            self._made[tensor] = self._by_name[name]
        return self._made[tensor]

    def __iter__(self) -> Iterator[int]:
        return iter({**self._made, **self._buffers})

    def __len__(self) -> int:
        return len({**self._made, **self._buffers})


def fill(
    root: nn.Module, owned: Iterable[Owned], values: Values, device: torch.device,
    parallel: TensorParallel | None = None,
) -> None:  # fmt: skip
    """Put into the parameters below `root` what is not the model's own, each rank its part.

    Raises:
        ModelError: as `Values.read`.
    """
    _allocate(root, device)
    with torch.no_grad():
        for mine in sorted(owned, key=lambda mine: values.position(mine.name)):
            parameter = mine.parameter
            part = local(parameter)
            if values.is_own(mine.name) or not part.numel():
                continue
            placement, spread = (R, R) if parallel is None else (parallel.of(mine.name), parallel.spread_of(mine.name))
            is_scalar = parameter.ndim != values.ndim(mine.name)  # stored with a dim
            for here, there in parts_of(parameter, placement, spread):
                if is_scalar:
                    part[here].copy_(values.read(mine.name).reshape(parameter.shape)[there])
                else:
                    part[here].copy_(values.read(mine.name, there))


def _allocate(root: nn.Module, device: torch.device) -> None:
    """Memory for the parameters below `root` that are on meta, ties kept; of a sharded one only this rank's part."""
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            module._parameters[leaf] = made[id(parameter)]
    # FSDP looks for new shards, and pads them, when `_apply` has run over its modules; that is how `to_empty` works,
    # which would also empty the buffers.
    root._apply(partial(_off_meta, device))  # type: ignore[no-untyped-call]


def _off_meta(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def _as_stored(
    name: str, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device, *, wrapped: bool,
    parallel: TensorParallel | None,
) -> nn.Parameter:  # fmt: skip
    """A parameter as the optimizer sees it: master dtype, this device, with `parallel` on its axis.

    FSDP wants it contiguous and with at least one dim; the blocks read a stored scalar as one.
    """
    kind = dtype if parameter.is_floating_point() else parameter.dtype
    shape = parameter.shape or torch.Size([1] if wrapped else [])
    value = parameter.detach()
    if parallel is not None:
        parallel.check(name, parameter.shape)
        value = parallel.cut(name, value)
    value = value.to("meta" if parameter.is_meta else device, kind)
    if wrapped or parallel is not None:
        value = value.contiguous()
    if wrapped:
        value = value.reshape(value.shape or (1,))
    if parallel is not None:
        return nn.Parameter(parallel.distributed(name, value, shape), parameter.requires_grad)
    same = value.data_ptr() == parameter.data_ptr() and value.shape == parameter.shape and not value.is_meta
    if same and value.dtype == parameter.dtype and value.stride() == parameter.stride():
        return parameter
    return nn.Parameter(value, parameter.requires_grad)


def release(model: nn.Module, engine: Engine, graph: Graph) -> None:
    """Put parameters that this rank does not train as they are on meta, to free their memory.

    Those that nothing reads stay: no block owns them.
    """
    kept = {id(owned.parameter) for owned in engine.owned}
    kept |= {id(p) for n, p in model.named_parameters() if n in graph.unused_parameters}
    memo: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or id(parameter) in kept:
                continue
            if id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            module._parameters[leaf] = memo[id(parameter)]


class StateTemplate:
    """What the plain model's `state_dict` has: its keys, and where each value is now."""

    def __init__(
        self, model: nn.Module, plan: Plan, graph: Graph, values: Values, parallel: TensorParallel | None = None
    ) -> None:
        """Values that no stage holds are read now: parameters that nothing reads, buffers that nothing writes.

        Raises:
            ModelError: as `Values.read`.
        """
        names = {id(p): name for name, p in model.named_parameters()}
        buffers = {id(b): name for name, b in model.named_buffers()}
        self._parallel = parallel
        self._dtype = master_dtype(plan.precision)
        self._keys: list[tuple[str, str, Any]] = []  # key, name of the parameter or buffer, value
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._kinds = {name: self._dtype if p.is_floating_point() else p.dtype for name, p in model.named_parameters()}
        readers = stages_of_parameters(plan, graph)
        self._stage_of = {graph.tensors[t].name: stages[0] for t, stages in readers.items()}
        if graph.fallbacks:
            self._stage_of = dict.fromkeys(self._shapes, 0)
        self._written: dict[str, int] = {}  # buffer -> stage that updates it
        for stage, positions in enumerate(stage_positions(plan)):
            for position in positions:
                for node in graph.blocks[position].nodes:
                    for tensor in graph.nodes[node].mutates:
                        if graph.tensors[tensor].kind == "buffer":
                            self._written[graph.tensors[tensor].name] = stage
        self._unused: dict[str, torch.Tensor] = {}
        self._constant: dict[str, torch.Tensor] = {}  # buffers as they were in the beginning
        for key, value in model.state_dict(keep_vars=True).items():
            name = names.get(id(value), buffers.get(id(value), ""))
            if id(value) in names:
                if name not in self._stage_of:
                    self._unused[name] = values.read(name).to("cpu", copy=True)
                value = None
            elif name and not values.is_own(name):
                value = values.buffer(name, torch.device("cpu"))
            if name and value is not None:
                self._constant[name] = value
            self._keys.append((key, name, value))

    def fill(
        self, pp_group: dist.ProcessGroup, engine: Engine, device: torch.device, *, rank0_only: bool
    ) -> dict[str, Any]:
        """The state dict, with `rank0_only` empty on all other ranks; collective."""
        owned = {o.name: o for o in engine.owned}
        me, stages = dist.get_rank(pp_group), dist.get_world_size(pp_group)
        keeps = not rank0_only or dist.get_rank() == 0
        values: dict[str, torch.Tensor] = dict(self._unused)

        def exchange(name: str, value: torch.Tensor, stage: int) -> None:
            if stages > 1:
                dist.broadcast(value, dist.get_global_rank(pp_group, stage), group=pp_group)
            if keeps:
                values[name] = value.cpu()

        for name, stage in self._stage_of.items():
            value = (
                self.whole(owned[name])
                if me == stage
                else torch.empty(self._shapes[name], dtype=self._kinds[name], device=device)
            )
            exchange(name, value, stage)
        current = engine.buffers()
        values.update(current)
        for _, name, value in self._keys:
            if name in self._written:
                stage = self._written[name]
                mine = self._held(name, current) if me == stage else torch.empty_like(value, device=device)
                exchange(name, mine.detach().contiguous(), stage)
        return {key: _plain(values.get(name, value)) for key, name, value in self._keys} if keeps else {}

    def save(
        self, folder: Path, engine: Engine, *, stage: int, is_writer: bool, max_shard_bytes: int,
        dtype: torch.dtype | None,
    ) -> list[Path]:  # fmt: skip
        """Write the state as safetensors; collective. Each stage's writer writes its own tensors, one at a time.

        Returns:
            The files, the index last.
        """
        files = self._files(max_shard_bytes, dtype)
        owned, current = {o.name: o for o in engine.owned}, engine.buffers()
        with together():
            if is_writer:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise _unwritable(folder, error) from error
                there = sorted(folder.glob("*.safetensors*"))
                if there:
                    raise RunError(f"{folder} holds weights already ({there[0].name}); give another directory")
        unfinished: list[Path] = []
        with removed_on_failure(unfinished):
            with together():
                failure: Exception | None = None
                for file_stage, file in files:
                    if file_stage == stage:
                        writes = is_writer and failure is None
                        failure = self._write(folder, file, owned, current, unfinished if writes else None) or failure
                if isinstance(failure, OSError):
                    raise _unwritable(folder, failure) from failure
                if failure is not None:
                    raise failure
            with together():
                for draft in list(unfinished):
                    final = _final(draft)
                    unfinished.append(final)
                    draft.replace(final)
            with together():
                lost = [file.name for _, file in files if dist.get_rank() == 0 and not (folder / file.name).is_file()]
                if lost:
                    raise RunError(
                        f"{folder} has no {lost[0]}, which another rank wrote; give a directory that all share"
                    )
            index = folder / "model.safetensors.index.json"
            with together():
                if dist.get_rank() == 0 and len(files) > 1:
                    draft = _draft(index)
                    unfinished.append(draft)
                    draft.write_bytes(index_of([file for _, file in files]))
                    draft.replace(index)
            unfinished.clear()
        return [folder / file.name for _, file in files] + ([index] if len(files) > 1 else [])

    def _files(self, max_shard_bytes: int, dtype: torch.dtype | None) -> list[tuple[int, FilePlan]]:
        """(stage, file) in order: a tensor once, under its first name; no file has tensors of two stages."""
        by_stage: dict[int, list[tuple[str, Entry]]] = {}
        named: dict[str, Any] = {}
        for _, name, value in self._keys:
            named.setdefault(name, value)
        for name, value in named.items():
            if name in self._shapes:
                shape, kind = self._shapes[name], self._kinds[name]
            elif name:
                shape, kind = tuple(value.shape), value.dtype
            else:
                raise RunError("the model's state_dict has extra state beside tensors, which safetensors cannot hold")
            entry = Entry(shape, dtype if dtype is not None and kind.is_floating_point else kind)
            by_stage.setdefault(self._stage_of.get(name, self._written.get(name, 0)), []).append((name, entry))
        parts: list[tuple[int, list[tuple[str, Entry]]]] = []
        for stage, entries in sorted(by_stage.items()):
            size = 0
            for name, entry in entries:
                if not parts or parts[-1][0] != stage or size + num_bytes(entry) > max_shard_bytes:
                    parts.append((stage, []))
                    size = 0
                parts[-1][1].append((name, entry))
                size += num_bytes(entry)
        if len(parts) == 1:
            return [(parts[0][0], FilePlan("model.safetensors", tuple(parts[0][1])))]
        return [
            (stage, FilePlan(f"model-{number:05d}-of-{len(parts):05d}.safetensors", tuple(entries)))
            for number, (stage, entries) in enumerate(parts, 1)
        ]

    def _write(
        self, folder: Path, file: FilePlan, owned: Mapping[str, Owned], current: Mapping[str, torch.Tensor],
        drafts: list[Path] | None,
    ) -> Exception | None:  # fmt: skip
        """One file, tensor by tensor, where `drafts` is given. A failure is returned: the others go on gathering."""
        failure: Exception | None = None
        with contextlib.ExitStack() as stack:
            out: Any = None
            if drafts is not None:
                draft = _draft(folder / file.name)
                drafts.append(draft)
                try:
                    out = stack.enter_context(draft.open("wb"))
                    out.write(header_of(file.tensors))
                except (OSError, PlannerError) as error:
                    failure = error
            for name, entry in file.tensors:
                value = self.whole(owned[name]) if name in owned else self._held(name, current)
                if out is None or failure is not None:
                    continue
                try:
                    out.write(raw(value.to("cpu", entry.dtype)))
                except OSError as error:
                    failure = error
        return failure

    def whole(self, owned: Owned, value: torch.Tensor | None = None) -> torch.Tensor:
        """The full parameter, or `value` held like it (its gradient), as the model has it.

        A collective of all ranks that hold parts of it.
        """
        placement, spread = R, R
        if self._parallel is not None:
            placement, spread = self._parallel.of(owned.name), self._parallel.spread_of(owned.name)
        full = whole(owned.parameter if value is None else value, placement, spread)
        return full.reshape(self._shapes[owned.name]).contiguous()

    def _held(self, name: str, current: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The full value of what is no owned parameter; a collective of `tp` for a buffer that is split and written."""
        if name in self._unused:
            return self._unused[name]
        if name not in current:
            return self._constant[name]
        return current[name] if self._parallel is None else self._parallel.gathered(name, current[name])


def _unwritable(folder: Path, error: OSError) -> RunError:
    return RunError(f"{folder} cannot be written ({error.strerror or error}); make room, or give another directory")


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _final(draft: Path) -> Path:
    return draft.with_name(draft.name.removeprefix(".").removesuffix(".partial"))


def _plain(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
