"""Everything that depends on DeepSpeed's internals: the only file that imports, patches or reads private parts of it.

Versions that are not in `TESTED_VERSIONS` are used with a warning, if they have the attributes that are patched or read
here (`_ZERO_ATTRIBUTES`): patching a method that no longer exists would silently do nothing.
"""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # noqa: PLC2701

from multihop.common.errors import UserError
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.deepspeed_config import fill_deepspeed_config
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import Model, ParamInit
from multihop.pretrain.optim.lamb import Lamb
from multihop.pretrain.optim.muon import Muon
from multihop.pretrain.optim.norms import squared_norms
from multihop.pretrain.optim.optimizers import build_optimizer
from multihop.pretrain.optim.slices import Slice, whole_shape
from multihop.pretrain.uncompiled import AdamW, call_directly

TESTED_VERSIONS = ("0.19.8",)
_GRADIENT_ATTRIBUTES = ("device", "check_overflow", "get_grad_norm_direct")
_STAGE_1_ATTRIBUTES = (
    *_GRADIENT_ATTRIBUTES,
    "scaled_global_norm",
    "averaged_gradients",
    # reduce_in_few_kernels
    "_allreduce_noncontiguous_bucket_preserving_fp32",
    "_get_compact_grad_partition_slice",
    "allreduce_bucket",
    "unflatten",
    "overlap_comm",
    "real_dp_process_group",
    "grad_start_offset",
    "grad_partition_insertion_offset",
    "partition_size",
    # owned_slices, update_model_weights
    "bit16_groups",
    "single_partition_of_fp32_groups",
    "update_lp_params",
    "ipg_buckets",
)
_ZERO_ATTRIBUTES: dict[int, tuple[str, ...]] = {
    0: (),
    1: _STAGE_1_ATTRIBUTES,
    2: _STAGE_1_ATTRIBUTES,
    3: (
        *_GRADIENT_ATTRIBUTES,
        "_get_norm_groups",
        # hide_gathers
        "parameter_offload",
        # owned_slices, update_model_weights
        "grad_position",
        "get_param_id",
        "_get_param_partition_rank",
        "fp32_partitioned_groups_flat",
        "fp16_groups",
        "_reassign_or_swap_out_partitioned_parameters",
        "persistent_parameters",
        # gradient_buckets, accumulated_gradients
        "ipg_buckets",
        "grad_partitions_flat_buffer",
    ),
}
"""Attributes of DeepSpeed's ZeRO optimizer that are patched or read here, by stage."""
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_REDUCE_BUCKET = 500_000_000
"""Number of elements: DeepSpeed's default."""

log = logging.getLogger("multihop")


def import_deepspeed() -> None:
    """Import DeepSpeed before `initialize` does, because it takes seconds.

    Its autotuner imports MLflow where that is installed, which takes most of these seconds, and memory on every rank.
    A step in ZeRO stages 1 to 3 imports its own Muon, which is not used here, and compiles a function of it.
    """
    is_imported = "mlflow" in sys.modules
    if not is_imported:
        sys.modules["mlflow"] = None  # type: ignore[assignment]  # an import raises ImportError
    try:
        with replaced(torch, compile=lambda function, **_: function):
            import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
        from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

        for owner in (coordinator, coordinator.PartitionedParameterCoordinator):  # of stage 3, which cannot be compiled
            call_directly(owner)
    finally:
        if not is_imported:
            del sys.modules["mlflow"]


def initialize(
    config: TrainingConfig, model: Model, ranks: Ranks, micro_batch_size: int, param_init: ParamInit | None
) -> tuple[Any, Any]:
    """Initialize DeepSpeed with `model`, and patch it.

    Args:
        model, micro_batch_size, param_init: as for `multihop.pretrain.engine.engine.Engine`.

    Returns:
        DeepSpeed's engine, and its ZeRO optimizer, or None in stage 0.

    Raises:
        UserError: The installed version lacks an attribute that is needed, or the configuration is refused.
    """
    import_deepspeed()
    import deepspeed
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS as known

    known += [each for each in (AdamW, Lamb, Muon) if each not in known]  # else it warns of untested ones
    _warn_if_untested(version("deepspeed"))
    stage = config.engine.zero_stage
    # DeepSpeed calls deprecated functions of torch.distributed: a warning for each collective.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    # DeepSpeed compiles its shared-memory all-reduce in the first launch, which takes a minute; if that is killed, it
    # leaves a lock on which every later launch hangs. gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if config.engine.precision == "fp16" and not torch.cuda.is_available():
        # DeepSpeed requires a processor with fp16 instructions. Without them torch is slower, but correct.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    assert isinstance(config.engine.deepspeed, dict)
    filled = fill_deepspeed_config(config.engine.deepspeed, config, micro_batch_size)
    if stage == 0:
        filled["gradient_clipping"] = 0.0  # Engine._guard_stage_0 clips
    # DeepSpeed allocates a buffer of this size in each backward pass, even for a small model.
    elements = sum(math.prod(whole_shape(parameter)) for parameter in model.parameters())
    filled["zero_optimization"].setdefault("reduce_bucket_size", min(_REDUCE_BUCKET, elements))
    # A separate buffer per bucket saves only traffic between ranks.
    filled["zero_optimization"].setdefault("contiguous_gradients", ranks.world_size > 1)
    if model.recurrent:  # all ranks must gather equally often, and a layer would gather once per time step
        for layer in model.layers:
            deepspeed.utils.set_z3_leaf_module(layer, True)
    if next(model.parameters()).is_meta:
        if stage == 3:
            _init_and_partition(model, filled, ranks, param_init)
        else:
            model.to_empty(device="cpu")
            if param_init:
                for name, parameter in model.named_parameters():
                    param_init(name, parameter)
    # Stage 3 would import torch's compiler, and cannot be compiled here.
    hooks = replaced(torch.compiler, disable=lambda function: function) if stage == 3 else nullcontext()
    with _one_optimizer_for_stages_1_and_2(stage), hooks:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(model, config.optimizer),
            config=filled,
            dist_init_required=False,
        )
    if stage == 0:
        _check_attributes(engine, ["enable_backward_allreduce"])
        if ranks.world_size == 1:
            engine.enable_backward_allreduce = False  # it would copy all gradients for nothing
        return engine, None
    zero = engine.optimizer
    _check_attributes(zero, _ZERO_ATTRIBUTES[stage])
    _read_norm_once(zero, stage, ranks.all_reduce_sum_)
    if stage in (1, 2):
        _reduce_in_few_kernels(zero)
    elif config.engine.activation_checkpointing == "selective":
        _hide_gathers(zero)
    return engine, zero


@contextmanager
def simulate_gpu() -> Iterator[None]:
    """Make DeepSpeed put on the meta device what it would put on a GPU, and not compare ranks that do not exist."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import linear, stage3, utils

    # With a number, because moving a tensor from the meta device to the meta device would be no operation.
    with (
        replaced(get_accelerator(), device_name=lambda *_: "meta:0", current_device_name=lambda: "meta:0"),
        replaced(stage3, defragment=_flatten_on_gpu),
        replaced(utils, assert_lst_len_same_as_other_ranks=_do_nothing, get_lst_from_rank0=lambda values: values),
        replaced(linear, get_accelerator=lambda: SimpleNamespace(device_name=lambda: "cpu")),  # autocast's name
    ):
        yield


def _flatten_on_gpu(tensors: list[Tensor]) -> Tensor:
    """DeepSpeed's `defragment` without its copy in the host's memory, which on the meta device would stay the only
    one."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device="meta")
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data = part.view(tensor.shape)
    return flat


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of an object until the block ends."""
    _check_attributes(owner, attributes)
    originals = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


def destroy_process_group() -> None:
    """Destroy the process group, also for DeepSpeed, so that it takes the next one."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    torch.distributed.destroy_process_group()
    groups._release_process_group_references()
    comm.cdb = None


def tensors_on_meta(zero: Any | None) -> list[Tensor]:
    """The tensors that DeepSpeed keeps on the meta device, for their shapes."""
    return [tensor for group in getattr(zero, "round_robin_bit16_meta", []) for tensor in group]


def gradient_buckets(zero: Any | None) -> list[Tensor]:
    """The buckets in which DeepSpeed collects gradients before it sends them."""
    buckets = [] if zero is None else zero.ipg_buckets.values()
    return [each for bucket in buckets for each in tree_leaves(bucket.buffer) if isinstance(each, Tensor)]


def accumulated_gradients(zero: Any | None, stage: int) -> list[Tensor]:
    """The buffer in which stage 3 sums this rank's part of the gradients of all micro-batches."""
    return [zero.grad_partitions_flat_buffer] if zero is not None and stage == 3 else []


def partitioned_weights(module: nn.Module, stage: int) -> list[Tensor]:
    """In stage 3 this rank's part of each parameter."""
    parameters: Iterable[Any] = module.parameters() if stage == 3 else ()
    return [parameter.ds_tensor.data for parameter in parameters]


def owned_slices(module: nn.Module, zero: Any | None, stage: int, rank: int, world_size: int) -> list[Slice]:
    """The slices of `module`'s parameters that `rank` owns; over all ranks they cover each parameter exactly once.

    LAMB and the checkpoints, which need individual parameters under ZeRO, both use this mapping.

    Args:
        zero: DeepSpeed's ZeRO optimizer after initialization; None in stage 0, where every rank holds all parameters
            and is assigned an equal part of them.
    """
    if stage == 0:
        return list(_even_slices(module, rank, world_size))
    return list(_slices_of_stage_3(module, zero) if stage == 3 else _slices_of_stages_1_and_2(module, zero))


def held_slices(module: nn.Module, owned: list[Slice], stage: int) -> list[Slice]:
    """The slices whose weights and moments this rank needs to resume: those it owns, or in stage 0 all."""
    return owned if stage > 0 else list(_even_slices(module, 0, 1))


def spans_of_rank(
    module: nn.Module, zero: Any | None, stage: int, rank: int, world_size: int
) -> list[tuple[str, int, int]]:
    """(parameter, start, elements) of each of the `held_slices` of any rank, by DeepSpeed's rules."""
    if stage == 0:
        return [(piece.name, piece.start, piece.numel) for piece in _even_slices(module, 0, 1)]
    assert zero is not None
    bounds: dict[int, tuple[int, int]] = {}
    if stage == 3:
        for parameter in module.parameters():
            part, numel = zero.grad_position[zero.get_param_id(parameter)][2], math.prod(whole_shape(parameter))
            bounds[id(parameter)] = rank * part, min((rank + 1) * part, numel)
    else:
        for parameters, size in zip(zero.bit16_groups, zero.partition_size, strict=True):
            offset = 0  # in the flat buffer of the group
            for parameter in parameters:
                first, stop = rank * size - offset, (rank + 1) * size - offset
                bounds[id(parameter)] = max(0, first), min(stop, parameter.numel())
                offset += parameter.numel()
    named = ((name, *bounds[id(parameter)]) for name, parameter in module.named_parameters())
    return [(name, start, stop - start) for name, start, stop in named if start < stop]


def updated_together(
    module: nn.Module, optimizer: torch.optim.Optimizer, zero: Any | None, stage: int
) -> list[tuple[list[Tensor], list[str]]]:
    """The flat buffers, and the parameters in them, that each call of the optimizer's step() updates.

    DeepSpeed calls it in stage 0 once for all, in stages 1 and 2 for one parameter group at a time, and in stage 3 for
    one sub-group.
    """
    named = list(module.named_parameters())
    if zero is None:
        flats = [flat for group in optimizer.param_groups for flat in group["params"]]
        return [(flats, [name for name, _ in named])]
    if stage < 3:
        ids = [{id(parameter) for parameter in group} for group in zero.bit16_groups]
        own = [[name for name, parameter in named if id(parameter) in group] for group in ids]
        return [([flat], names) for flat, names in zip(zero.single_partition_of_fp32_groups, own, strict=True)]
    names: list[list[str]] = [[] for _ in zero.fp32_partitioned_groups_flat]
    for name, parameter in named:
        names[zero.grad_position[zero.get_param_id(parameter)][0]].append(name)
    return [([flat], own) for flat, own in zip(zero.fp32_partitioned_groups_flat, names, strict=True)]


def update_model_weights(zero: Any | None, stage: int) -> None:
    """Update the weights that the model computes with from the fp32 slices of all ranks. A collective call."""
    if zero is None:
        return
    if stage < 3:
        zero.update_lp_params()
        return
    for sub_group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(sub_group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def replicated_weights(module: nn.Module, stage: int) -> Iterator[tuple[str, Tensor]]:
    """The weights that the model computes with, whole, one after another. In stage 3 all ranks must take all of them:
    each is gathered, unless this rank keeps it."""
    if stage < 3:
        yield from module.named_parameters()
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    for name, parameter in module.named_parameters():
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:  # type: ignore[attr-defined]
            yield name, parameter
        else:
            with GatheredParameters([parameter]):
                yield name, parameter


def drop_gradients(zero: Any, stage: int) -> None:
    """Drop the gradients of a step that was not applied.

    In stages 1 and 2 with an offloaded optimizer, DeepSpeed keeps them, including NaN, and would accumulate into them.
    """
    if stage < 3:
        zero.averaged_gradients.clear()


def _warn_if_untested(found: str) -> None:
    if found not in TESTED_VERSIONS:
        log.warning(
            "DeepSpeed %s is not a version that multihop was tested with (%s)", found, ", ".join(TESTED_VERSIONS)
        )


def _check_attributes(owner: object, names: Iterable[str]) -> None:
    """Check that the installed DeepSpeed has what is patched and read here.

    Raises:
        UserError: It lacks an attribute.
    """
    for name in names:
        if not hasattr(owner, name):
            known_as = getattr(owner, "__name__", type(owner).__name__)
            raise UserError(
                f"DeepSpeed {version('deepspeed')} has no {known_as}.{name}, which multihop needs; install a version "
                f"that was tested: deepspeed=={TESTED_VERSIONS[-1]}"
            )


@contextmanager
def _one_optimizer_for_stages_1_and_2(stage: int) -> Iterator[None]:
    """Make DeepSpeed use its usual ZeRO optimizer also in stage 1 with bf16 and fp32 gradients, which it supports.

    DeepSpeed would choose another one, which stores gradients and slices elsewhere.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    _check_attributes(DeepSpeedEngine, ["_do_optimizer_sanity_check"])
    check: Any = DeepSpeedEngine._do_optimizer_sanity_check
    if stage == 1:
        DeepSpeedEngine._do_optimizer_sanity_check = lambda *_: ZERO_OPTIMIZATION
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = check


def _init_and_partition(
    model: Model, deepspeed_config: dict[str, Any], ranks: Ranks, param_init: ParamInit | None
) -> None:
    """For each module, allocate memory, set its weights on rank 0, broadcast them, and keep this rank's partition."""
    from deepspeed.runtime.zero.partition_parameters import Init

    dtype = next(
        (half for key, half in _HALF_DTYPES.items() if deepspeed_config.get(key, {}).get("enabled")),
        torch.float32,
    )
    # Children before parents: Init skips parameters that are partitioned already.
    for path, module in reversed(list(model.named_modules())):
        module.to_empty(device="cpu", recurse=False)
        for name, parameter in module.named_parameters(recurse=False):
            if param_init and ranks.rank == 0:
                param_init(f"{path}.{name}" if path else name, parameter)
            parameter.data = parameter.data.to(dtype)
        Init(module=module, config_dict_or_path=deepspeed_config, mem_efficient_linear=False)


def _read_norm_once(zero: Any, stage: int, all_reduce_sum_: Callable[[Tensor], None]) -> None:
    """Make DeepSpeed's ZeRO optimizer copy the gradient's norm to the host once per step, and read nothing else.

    DeepSpeed checks each gradient tensor for NaN and infinity, then their norm, and the norm again wherever it clips.
    Each check makes the host wait for the device. Any non-finite element makes the norm non-finite, so the norm is
    computed on the device without a check and copied to the host, where DeepSpeed's checks of it cost nothing. With an
    offloaded optimizer, DeepSpeed's computation of the norm is unchanged, which reads once per parameter.
    """

    def group_norm(gradients: Iterable[Tensor], parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of a parameter group's gradients over all ranks, float64 () on the device."""
        assert norm_type == 2.0
        real = (gradient.detach() for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        each = [gradient for gradient, _ in zip(real, parameters, strict=False)]
        zero_norm = torch.zeros((), dtype=torch.float64, device=zero.device)
        square = squared_norms(each).sum() if each else zero_norm
        all_reduce_sum_(square)
        return square.sqrt()

    zero.check_overflow = _do_nothing
    zero.get_grad_norm_direct = group_norm
    if stage == 3:
        norm_groups = zero._get_norm_groups
        zero._get_norm_groups = lambda: torch.stack(norm_groups()).cpu().unbind()
    else:
        global_norm = zero.scaled_global_norm
        zero.scaled_global_norm = lambda: global_norm().cpu()


def _do_nothing(*_: object, **__: object) -> None:
    """Replace a check that the norm makes unnecessary."""


def _reduce_in_few_kernels(zero: Any) -> None:
    """Make DeepSpeed's ZeRO optimizer of stage 1 or 2 accumulate a bucket of gradients, in fp32, with few kernels.

    DeepSpeed copies the sums out of a bucket with three kernels per parameter, one of which only serves its functions
    that read gradients. Here the bucket is converted at once, and added by multi-tensor kernels. This applies only
    where buckets are not contiguous and the reduction does not overlap the backward pass.
    """
    original = zero._allreduce_noncontiguous_bucket_preserving_fp32

    def reduce(gradients: Sequence[Tensor], params: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> None:
        """`params` has (group, number in the group, id) of each gradient's parameter."""
        if zero.overlap_comm:
            original(gradients, params, dtype)
            return
        summed = zero.unflatten(zero.allreduce_bucket(gradients, dtype).float(), gradients)
        totals, parts = [], []
        for gradient, (group, _, number) in zip(summed, params, strict=True):
            rank = torch.distributed.get_rank(zero.real_dp_process_group[group])
            start = zero.grad_start_offset[group][rank].get(number)
            if start is not None:  # else no part of it belongs to this rank
                at = int(zero.grad_partition_insertion_offset[group][rank][number])
                elements = min(gradient.numel() - int(start), int(zero.partition_size[group]) - at)
                totals.append(zero._get_compact_grad_partition_slice(group, rank, number, elements))
                parts.append(gradient.view(-1).narrow(0, int(start), elements))
        if totals:
            torch._foreach_add_(totals, parts)

    zero._allreduce_noncontiguous_bucket_preserving_fp32 = reduce


def _hide_gathers(zero: Any) -> None:
    """Hide ZeRO stage 3's gathering of weights from selective activation checkpointing.

    Selective checkpointing records a layer's operations, which must be the same when the backward pass recomputes them.
    Gathering would differ: weights that were prefetched or are still present are not gathered again.
    """
    hooks, names = zero.parameter_offload, ("pre_sub_module_forward_function", "post_sub_module_forward_function")
    _check_attributes(hooks, names)
    for name in names:
        setattr(hooks, name, _without_dispatch_modes(getattr(hooks, name)))


def _without_dispatch_modes(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(module: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            hook(module)

    return call


def _slices_of_stages_1_and_2(module: nn.Module, zero: Any) -> Iterator[Slice]:
    buffers = {
        id(parameter): flat
        for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        for parameter in parameters
    }
    for name, parameter in module.named_parameters():
        _check_attributes(parameter, ["_hp_mapping"])
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # None: this rank has no element of it
        if mapping is not None:
            flat, start = mapping.hp_fragment_address, mapping.lp_fragment_address.start
            yield Slice(name, tuple(parameter.shape), start, flat.numel, buffers[id(parameter)], flat.start)


def _slices_of_stage_3(module: nn.Module, zero: Any) -> Iterator[Slice]:
    for name, parameter in module.named_parameters():
        sub_group, flat_start, part = zero.grad_position[zero.get_param_id(parameter)]
        shape = whole_shape(parameter)
        start = zero._get_param_partition_rank(parameter) * part
        numel = min(part, torch.Size(shape).numel() - start)  # the last ranks' parts are padded or only padding
        if numel > 0:
            yield Slice(name, shape, start, numel, zero.fp32_partitioned_groups_flat[sub_group], flat_start)


def _even_slices(module: nn.Module, rank: int, world_size: int) -> Iterator[Slice]:
    for name, parameter in module.named_parameters():
        part = -(
            -parameter.numel() // world_size
        )  # the same on all ranks but the last ones: one stripe of a checkpoint's layout
        start = part * rank
        numel = min(part, parameter.numel() - start)
        if numel > 0:
            yield Slice(name, tuple(parameter.shape), start, numel, parameter, start)
