"""Turns a Metal program with one kernel variant into C++ for OpenCL: the kernel template becomes an entry point."""

from __future__ import annotations

from collections.abc import Sequence

from evidence.proof.dialects import KernelTemplate, Parameter, errors_by_line, find_kernel, without_comments

CONSTANT = "constant_b"  # begins the name of a block of constants in an entry point, for spaces.py


def _of_three(function: str) -> str:
    return "metal::shim_uint3{" + ", ".join(f"(uint){function}({axis})" for axis in range(3)) + "}"


POSITIONS = {
    "threadgroup_position_in_grid": _of_three("get_group_id"),
    "threadgroups_per_grid": "metal::shim_uint3{groups_0, groups_1, groups_2}",  # Mesa has no get_num_groups here
    "thread_index_in_threadgroup": "(uint)get_local_id(0)",
    "thread_index_in_simdgroup": "get_sub_group_local_id()",
    "simdgroup_index_in_threadgroup": "get_sub_group_id()",
}


def opencl(program: str, kernel: str, arguments: Sequence[str], threads: int) -> str:
    """Returns the text. `program` is what the host gives to Metal, without the line that instantiates the kernel."""
    text = errors_by_line(without_comments(program))
    result = find_kernel(text, kernel)
    head = f"__attribute__((reqd_work_group_size({threads}, 1, 1))) __kernel void {'_'.join((kernel, *arguments))}("
    formal = [_formal(each) for each in result.buffers]
    if any(each.attribute == "threadgroups_per_grid" for each in result.parameters):
        formal += [f"uint groups_{axis}" for axis in range(3)]
    head += ", ".join(formal) + ") { "
    return text[: result.begin] + head + " ".join(_declarations(result, arguments)) + text[result.body :]


def _formal(parameter: Parameter) -> str:
    """Arguments do not alias, as on Metal."""
    return f"__global void* __restrict {CONSTANT if parameter.is_block else 'b'}{parameter.binding}"


def _declarations(kernel: KernelTemplate, arguments: Sequence[str]) -> list[str]:
    """Declares the names that the body uses for the template's and the kernel's parameters. OpenCL has threadgroup
    memory only in entry points, so the body stays in one.
    """
    lines = kernel.constants(arguments)
    for each in kernel.parameters:
        if each.attribute == "buffer" and each.is_block:
            pointer = each.type.rstrip("&") + "*"
            lines.append(f"{each.type} {each.name} = *({pointer}){CONSTANT}{each.binding};")
        elif each.attribute == "buffer":
            lines.append(f"{each.type} {each.name} = ({each.type})b{each.binding};")
        elif each.attribute in POSITIONS:
            lines.append(f"const {each.type} {each.name} = {POSITIONS[each.attribute]};")
        else:
            raise ValueError(f"{kernel.name}: [[{each.attribute}]] has no counterpart in OpenCL here")
    return lines
