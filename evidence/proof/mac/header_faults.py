"""Plants faults into copies of our stub headers. The comparison with Apple's API must find each of them."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from evidence.proof.checks import Finding
from evidence.proof.mac import apple_headers

METAL = "mps_simulator/src/mps_simulator/metal/include/Metal"


@dataclass(frozen=True)
class Fault:
    what: str
    file: str
    right: str
    wrong: str
    named: str  # the declaration that the comparison must name

    def plant(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        if self.right not in text:
            raise ValueError(f"{self.file} has no {self.right!r} to plant a fault in")
        path.write_text(text.replace(self.right, self.wrong, 1))


FAULTS = (
    Fault(
        "an enum value",
        f"{METAL}/MTLLibrary.h",
        "MTLLanguageVersion3_1 = 196609",
        "MTLLanguageVersion3_1 = 196610",
        "MTLLanguageVersion3_1",
    ),
    Fault(
        "an enum's underlying type",
        f"{METAL}/MTLLibrary.h",
        "NS_ENUM(NSInteger, MTLMathMode)",
        "NS_ENUM(uint32_t, MTLMathMode)",
        "MTLMathModeSafe",
    ),
    Fault(
        "an enumerator that does not exist",
        f"{METAL}/MTLDevice.h",
        "MTLGPUFamilyApple9 =",
        "MTLGPUFamilyApple9Pro =",
        "MTLGPUFamilyApple9Pro",
    ),
    Fault(
        "an argument too few",
        f"{METAL}/MTLComputeCommandEncoder.h",
        "- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;",
        "- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset;",
        "-setBuffer:offset:",
    ),
    Fault(
        "an argument's type",
        f"{METAL}/MTLComputeCommandEncoder.h",
        "setThreadgroupMemoryLength:(NSUInteger)length",
        "setThreadgroupMemoryLength:(int)length",
        "-setThreadgroupMemoryLength:atIndex:",
    ),
    Fault(
        "a result's type",
        f"{METAL}/MTLBuffer.h",
        "- (void *)contents;",
        "- (uint64_t)contents;",
        "-contents",
    ),
    Fault(
        "a property's type",
        f"{METAL}/MTLComputePipeline.h",
        "NSUInteger threadExecutionWidth",
        "uint32_t threadExecutionWidth",
        "-threadExecutionWidth",
    ),
    Fault(
        "a misspelt selector of Metal",
        f"{METAL}/MTLComputeCommandEncoder.h",
        "dispatchThreadgroups:(MTLSize)threadgroupsPerGrid threadsPerThreadgroup:",
        "dispatchThreadgroups:(MTLSize)threadgroupsPerGrid threadsPerThreadGroup:",
        "-dispatchThreadgroups:threadsPerThreadGroup:",
    ),
    Fault(
        "a misspelt selector of Foundation",
        "evidence/proof/mac/include/Foundation/Foundation.h",
        "stringWithUTF8String:",
        "stringWithUtf8String:",
        "+stringWithUtf8String:",
    ),
    Fault(
        "a protocol where Apple has a class",
        f"{METAL}/MTLCaptureManager.h",
        "@interface MTLCaptureManager : NSObject",
        "@protocol MTLCaptureManager",
        "MTLCaptureManager: protocol",
    ),
    Fault(
        "a parent that it does not have",
        f"{METAL}/MTLComputePipeline.h",
        "@protocol MTLComputePipelineState <NSObject>",
        "@protocol MTLBuffer;\n@protocol MTLHeap <NSObject>\n@end\n@protocol MTLComputePipelineState <MTLHeap>",
        "MTLComputePipelineState MTLHeap",
    ),
    Fault(
        "the order of a struct's fields",
        f"{METAL}/MTLTypes.h",
        "NSUInteger width, height, depth;",
        "NSUInteger depth, height, width;",
        "struct MTLSize",
    ),
)


def planted(fault: Fault, directory: Path) -> Path:
    """Makes a copy of all stub headers with the fault in it, in the checkout's layout."""
    for folder in {folder for folders in apple_headers.STUB_SETS.values() for folder in folders}:
        shutil.copytree(apple_headers.CHECKOUT / folder, directory / folder)
    fault.plant(directory)
    return directory


def problems_with(fault: Fault, reference: apple_headers.Reference, names: frozenset[str]) -> list[str]:
    """Returns the problems of the faulty copy that our own headers do not have."""
    with tempfile.TemporaryDirectory() as directory:
        declarations = apple_headers.stubs(planted(fault, Path(directory)))
    return apple_headers.judge(apple_headers.compare(declarations, reference, names)).problems


def check_faults(reference: apple_headers.Reference, names: frozenset[str]) -> Finding:
    """Checks that some problem names each planted fault."""
    missed = [
        f"{fault.what} ({fault.named}) went unnoticed"
        for fault in FAULTS
        if not any(fault.named in problem for problem in problems_with(fault, reference, names))
    ]
    return Finding(len(FAULTS), missed, [f"planted: {', '.join(fault.what for fault in FAULTS)}"])
