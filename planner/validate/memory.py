"""The predicted bytes of a rank: the planner's own memory model, under the conventions of the software that ran.

What blocks keep and need comes from the traced graph, as for any plan. What differs between training systems is data
with a source (`profiles/published/memory.toml`): in how many bytes gradients stay, what the optimizer step holds for a
moment, what the loss makes of the logits, which work spaces libraries allocate, how much of what torch reserves is in
use. Software that wraps block by block (FSDP2, DDP) holds what `planner.memory` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from planner.costs import Costs, Ints
from planner.memory import optimizer_moments, precision_named, transient_bytes
from planner.schedule import in_flight
from planner.validate.cases import Case, StageCase
from planner.validate.conventions import Conventions
from planner.validate.step import Priced

Floats = NDArray[np.float64]

# Micro-batches held, in units of those of 1F1B: Qi et al. 2023 (arXiv 2401.10241), table 1.
HELD = {"1f1b": 1.0, "interleaved": 1.0, "zb-1p": 1.0, "zb-2p": 2.0, "zb-v": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """What the bytes of one rank are; they add up to what torch has allocated at the peak, without the last two."""

    parameters_bytes: float = 0.0
    gradients_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activations_bytes: float = 0.0
    logits_bytes: float = 0.0  # what the last block keeps, or what its loss holds
    transient_bytes: float = 0.0
    buffers_bytes: float = 0.0  # of messages, the batch, and work spaces of libraries
    slack_bytes: float = 0.0  # reserved, not allocated
    context_bytes: float = 0.0  # outside of torch: CUDA context and communicators

    @property
    def allocated_bytes(self) -> float:
        """As `torch.cuda.max_memory_allocated`."""
        return float(sum(getattr(self, f.name) for f in fields(self)) - self.slack_bytes - self.context_bytes)

    def of_kind(self, kind: str) -> float:
        """As it was measured: allocated, reserved or nvidia-smi."""
        total = self.allocated_bytes
        if kind in ("reserved", "nvidia-smi"):
            total += self.slack_bytes
        return total + (self.context_bytes if kind == "nvidia-smi" else 0.0)


def stage_memory(case: Case, stage: StageCase, p: int, priced: Priced, weights: Floats, share: Floats) -> MemoryTerms:
    """Bytes of a rank of stage `p`, as `memory.stage_peak_bytes` adds them up, for shares of blocks.

    Args:
        case: The row.
        stage: Its stage `p`.
        p: Number of the stage.
        priced: Tables of the stage's degrees.
        weights: [L] shares of the blocks that the stage has.
        share: [L] how often a block is recomputed.
    """
    by = case.conventions
    costs, (plain, again) = priced.costs, priced.columns
    held = weights > 0
    zero = costs.strategies[plain].zero
    last = p == case.pp - 1
    flying = chunks_in_flight(case, p)
    activation = weights * ((1 - share) * costs.activation_bytes[:, plain] + share * costs.activation_bytes[:, again])
    if case.frozen_bytes:
        activation = activation + np.where(priced.is_layer, weights * (1 - share) * _of_adapters(case, stage), 0.0)
    if by.checkpoint_parts and zero == 3:
        activation = np.where(share == 1, activation / stage.tp, activation)
    if stage.recomputed_operators is not None:
        activation = np.where(priced.is_layer, _by_operators(case, stage, priced, weights), activation)
    if stage.kept_share is not None:
        activation = np.where(
            priced.is_layer, weights * stage.kept_share * costs.activation_bytes[:, plain], activation
        )
    activation = activation * (1 - stage.offloaded_activations)
    transient, reduction = _transient(case, priced, by, np.where(share > 0, again, plain), held)
    head = _head(case, stage, by) if last and held[-1] and by.logit_bytes and case.has_head else 0.0
    if not case.has_head:
        activation[-1] = transient[-1] = 0.0
    if head:
        # The loss is taken, and passed back, as soon as its logits are there: they exist for one micro-batch.
        activation[-1] = 0.0
        transient[-1] = head
    saved = (flying - 1) * activation.sum() + np.cumsum(activation)
    at = int(np.argmax(np.where(held, saved + transient, -1.0)))
    in_passes = float(saved[at] + transient[at])
    short_lived = float(transient[at]) + max(0.0, reduction - in_passes)
    logits = float(activation[-1]) if last and at == len(activation) - 1 else 0.0
    if head and at == len(activation) - 1:
        logits, short_lived = head, short_lived - head
    parameters, gradients, optimizer, own = _state(case, stage, priced, weights, by)
    optimizer *= 1 - stage.offloaded_optimizer
    gradients *= 1 - stage.offloaded_gradients
    if stage.offloaded_parameters and zero < 3:  # one block is used while the next is fetched
        blocks = precision_named(costs.precision).compute_bytes * np.where(held, priced.elements, 0.0)
        parameters *= 1 - stage.offloaded_parameters
        parameters += stage.offloaded_parameters * float((blocks[:-1] + blocks[1:]).max(initial=blocks.max()))
    # The optimizer steps when no activation is left.
    short_lived += max(0.0, by.step_bytes * own - in_passes)
    if by.loads_whole and zero == 3:  # beside a rank's own part, before the first step
        short_lived += max(0.0, parameters * priced.groups.shards.num_ranks - in_passes)
    received = costs.received_bytes
    assert received is not None
    kept = weights * ((1 - share) * received[:, plain] + share * received[:, again])
    buffers = _buffers(case, costs, p, held, flying, kept)
    hopper = float(case.cluster.device.compute_capability) >= 9
    buffers += by.hopper_workspace_bytes if hopper else by.workspace_bytes
    device = case.cluster.device
    total = parameters + gradients + optimizer + float(saved[at]) + short_lived + buffers + (logits if head else 0.0)
    return MemoryTerms(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=float(saved[at]) - (0.0 if head else logits),
        logits_bytes=logits,
        transient_bytes=short_lived,
        buffers_bytes=buffers,
        slack_bytes=total * by.reserved_fraction / (1 - by.reserved_fraction),
        context_bytes=float(device.context_bytes + device.communicator_bytes),
    )


def chunks_in_flight(case: Case, p: int) -> float:
    """Micro-batches whose activations stage `p` holds, in units of all its layers."""
    m, pp, v = case.num_microbatches, case.pp, case.virtual_stages
    if v > 1:
        # Narayanan et al. 2021 (arXiv 2104.04473), figure 4: warm-up chunks, and the one that runs. Megatron-LM takes
        # micro-batches in groups of pp, or of all where pp leaves a rest smaller than pp.
        group = pp if m % pp == 0 or m % pp >= pp else m
        return min(float(m), (2 * (pp - p - 1) + (v - 1) * group + 1) / v)
    if case.pipeline == "zb-v":
        return float(min(m, pp))
    return min(float(m), HELD[case.pipeline] * in_flight("1f1b", p, pp, m))


def _state(
    case: Case, stage: StageCase, priced: Priced, weights: Floats, by: Conventions
) -> tuple[float, float, float, float]:
    """Parameters, gradients, masters with moments, and the elements that a rank itself steps."""
    costs = priced.costs
    policy = precision_named(costs.precision)
    zero = costs.strategies[priced.columns[0]].zero
    ranks = priced.groups.shards.num_ranks if zero else 1
    elements = float(weights @ priced.elements)
    kept = (policy.master_bytes if policy.casts else 0) + policy.master_bytes * optimizer_moments(case.optimizer)
    if case.frozen_bytes:
        # Adapters are some thousandths of the model; embeddings stay in half precision.
        words = 2.0 * case.spec.vocabulary * case.spec.hidden
        whole = costs.strategies[priced.columns[0]].zero == 3
        held = case.frozen_bytes * max(0.0, elements - words / 2) + words
        return held / (ranks if whole else 1), 0.0, 0.0, 0.0
    if not by.gradient_bytes:
        state = float(weights @ costs.state_bytes[:, priced.columns[0]])
        own = elements / ranks
        parameters = policy.compute_bytes * elements if zero < 3 and policy.casts else 0.0
        optimizer = min(kept * own, state - parameters)
        return parameters, state - parameters - optimizer, optimizer, own
    experts = float(weights @ priced.expert_elements)
    if case.expert_tp and case.expert_tp != stage.tp:
        elements += experts * (stage.tp / case.expert_tp - 1)
        experts *= stage.tp / case.expert_tp
    if case.pp == 1:
        elements += _untied(case, priced) * case.spec.vocabulary * case.spec.hidden / stage.tp
    # An expert is on fewer ranks, so its state is sharded over fewer (Megatron-LM's distributed optimizer).
    own = (elements - experts) / ranks + experts / max(1.0, ranks / case.ep)
    wide = policy.compute_bytes / 2
    return (
        policy.compute_bytes * (own if zero == 3 else elements),
        by.gradient_bytes * wide * (own if zero >= 2 else elements),
        kept * own,
        own,
    )


def _untied(case: Case, priced: Priced) -> int:
    """1 where the model ties embedding and head and the row does not, -1 the other way round."""
    if case.ties_embeddings is None:
        return 0
    matrices = [p for block in priced.graph.blocks for p in block.parameters if len(priced.graph.tensors[p].shape) == 2]
    return int(len(set(matrices)) < len(matrices)) - int(case.ties_embeddings)


def _of_adapters(case: Case, stage: StageCase) -> float:
    """What a layer saves beyond that of a model that is trained in full.

    Products with weights of 4 bits keep their inputs beside what is kept anyway (bitsandbytes MatMul4Bit); adapters of
    LLaMA-Adapter V2 (Gao et al. 2023, arXiv 2304.15010) scale, so keep, the output of every linear layer.
    """
    spec = case.spec
    gates = 2 if spec.architecture == "llama" else 1
    inputs = 3 * spec.hidden + spec.ffn_hidden if case.frozen_bytes < 2 else 0
    outputs = 5 * spec.hidden + gates * spec.ffn_hidden if case.row.note("Adapter v2") else 0
    return 2.0 * stage.micro_batch * spec.sequence * (inputs + outputs)


def _head(case: Case, stage: StageCase, by: Conventions) -> float:
    """What the loss holds at most: logits in half, in single, and their gradients."""
    tokens = case.spec.target_sequence or case.spec.sequence
    return by.logit_bytes * stage.micro_batch * tokens * case.spec.vocabulary / stage.tp


# Aceso counts a layer as 13 operators, the core of attention as four of them, and recomputes first what holds most
# (Liu et al. 2024, "Aceso", section 3.2: greedily, operator by operator).
OPERATORS, CORE_OPERATORS = 13.0, 4.0


def _by_operators(case: Case, stage: StageCase, priced: Priced, weights: Floats) -> Floats:
    """[L] saved bytes of layers of which single operators are recomputed, those that hold most first."""
    assert stage.recomputed_operators is not None
    scores = case.spec.heads / stage.tp * case.spec.sequence**2 * stage.micro_batch
    whole = priced.costs.activation_bytes[:, priced.columns[0]]
    # The result of the softmax, of dropout, and its mask: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1.
    core = (5.0 if case.dropout else 2.0) * scores if case.attention == "unfused" else 0.0
    rest = np.maximum(whole - core, 0.0)
    again = stage.recomputed_operators
    left = max(0.0, 1 - again / CORE_OPERATORS)
    others = 1 - max(0.0, again - CORE_OPERATORS) / (OPERATORS - CORE_OPERATORS)
    return np.asarray(weights * (core * left + rest * max(0.0, others)))


def _transient(
    case: Case, priced: Priced, by: Conventions, columns: Ints, held: NDArray[np.bool_]
) -> tuple[Floats, float]:
    """[L] short-lived bytes of each block beside its neighbours of the same stage, and those of the last reductions."""
    costs = priced.costs
    part = costs.working.take((np.arange(len(held)), columns))
    zero = costs.strategies[int(columns[0])].zero
    none = np.zeros_like(part.reduction)
    if not case.engine.by_block or case.frozen_bytes:
        # Gradients: there are none, or they are added and reduced where they lie, or parameter by parameter.
        part = replace(part, reduce_input=none, reduction=none, gradient=none)
    if zero == 3 and by.live_elements:
        width = precision_named(costs.precision).compute_bytes
        sizes = [[priced.graph.tensors[p].num_elements.fixed for p in b.parameters] for b in priced.graph.blocks]
        largest = np.array([max(each, default=0.0) for each in sizes], np.float64)
        live = np.minimum(part.gathered, width * np.maximum(largest, by.live_elements))
        part = replace(part, gathered=none, gradient=width * largest, forward=part.forward + live,
                       backward=part.backward + live)  # fmt: skip
    before = np.concatenate([[0.0], (part.gathered * held)[:-1]])
    after = np.concatenate([(part.reduce_input * held)[1:], [0.0]])
    found = transient_bytes(part, before, after, sync_at_end=costs.sync_at_end(zero))
    return np.where(held, found, 0.0), float((part.reduction * held).max())


def _buffers(case: Case, costs: Costs, p: int, held: NDArray[np.bool_], flying: float, kept: Floats) -> float:
    """Messages between stages, less those of all that the first block has `kept` [L]; and the batch."""
    first, end = int(np.flatnonzero(held)[0]), int(np.flatnonzero(held)[-1]) + 1
    if case.engine.receives_all_at_once:
        return float(costs.boundary_bytes(p, first, end) - (flying * kept[first] if p else 0.0))
    hops = costs.hop_bytes
    received = float(hops[first - 1]) if p and first else 0.0
    sent = float(hops[end - 1]) if p < case.pp - 1 and end <= len(hops) else 0.0
    buffers = costs.input_bytes + costs.unused_bytes + flying * costs.prelude_bytes
    return float(buffers + min(2.0, flying) * (received + sent))


def measured_stage(case: Case, peaks: Sequence[float]) -> int:
    """The stage whose memory was measured."""
    if case.row.memory_is_of_last_rank:
        return len(peaks) - 1
    seen = len(peaks)
    if stored := case.row.note(r"only the first (\d+) ranks"):
        ranks = np.cumsum([stage.tp * stage.dp for stage in case.stages])
        seen = max(1, int(np.searchsorted(ranks, int(stored[1]), side="left")) + 1)
    return int(np.argmax(peaks[:seen]))
