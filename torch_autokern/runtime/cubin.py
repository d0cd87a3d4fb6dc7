"""What a cubin may contain, read from its ELF bytes before the driver sees them. The manifest is a claim, these bytes the fact.

Two layouts are known: ELF OS-ABI 0x33 with ABI version 7 (assemblers up to CUDA 12.8, Triton's among them) and OS-ABI 0x41 with
version 8 (CUDA 12.9 and 13). Anything else is refused. Section and attribute numbers were read off `cuobjdump -elf` and the
bytes beside it; flag bits are those of LLVM's ``BinaryFormat/ELF.h`` (EF_CUDA_*).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from torch_autokern.errors import AutokernError

MAX_CUBIN_BYTES = 64 << 20
MAX_SECTIONS = 4096
MAX_SYMBOLS = 1 << 12
MAX_ENTRIES = 256
MAX_PARAMETERS = 256
# From capability 9.0 on the driver keeps the first KiB of a block's shared memory; the assembler counts it as static.
_RESERVED_SHARED_BYTES = 1024
_RESERVED_SYMBOL = ".nv.reservedSmem.offset0"
_CUDA_MACHINE, _EXECUTABLE = 190, 2
_LAYOUTS = {(0x33, 7): 7, (0x41, 8): 8}
_SYMTAB, _NOBITS = 2, 8
_FUNCTION, _ENTRY_FLAG = 2, 0x10
_ALLOWED_SECTIONS = (".shstrtab", ".strtab", ".symtab", ".note.nv.", ".nv.", ".text.", ".rel.", ".rela.", ".debug_frame")
_DEBUG_SECTIONS = (".debug_", ".nv_debug", ".rel.debug_", ".rela.debug_", ".rel.nv_debug", ".rela.nv_debug")
_FRAME_SECTIONS = (".debug_frame", ".rel.debug_frame", ".rela.debug_frame")
_NO_VALUE, _BYTE, _HALF, _SIZED = 1, 2, 3, 4
_MAX_THREADS, _REQUIRED_BLOCK, _FRAME_SIZE, _STACK_SIZE, _PARAMETER, _PARAMETER_BYTES = 0x05, 0x10, 0x11, 0x12, 0x17, 0x19
_MAX_STACK_SIZE, _REGISTERS, _CLUSTER, _PARAMETER_V2 = 0x23, 0x2F, 0x3D, 0x45
_ARCH = re.compile(rb"-arch[ =]+(sm_[0-9]{2,3}[af]?)\b")

Triple = tuple[int, int, int]


class MalformedCubinError(AutokernError):
    """The bytes are no cubin of a known layout, or contradict themselves."""


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: where its bytes lie in the parameter block."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class EntryInfo:
    """One kernel. `static_shared_bytes` leaves out what the driver reserves; `stack_bytes` is the frame in local memory, which
    also holds spilled registers; `required_block` and `cluster` are None where the code does not fix them."""

    name: str
    registers: int
    static_shared_bytes: int
    stack_bytes: int
    parameters: tuple[Parameter, ...]
    max_threads: int
    required_block: Triple | None
    cluster: Triple | None


@dataclass(frozen=True)
class CubinInfo:
    """A cubin: architecture with suffix ("sm_90a"), layout (ELF ABI version), kernels by name, and what no kernel may have:
    symbols it wants from elsewhere, bytes of memory that outlive a launch, sections with debug information."""

    arch: str
    abi_version: int
    entries: dict[str, EntryInfo]
    undefined: tuple[str, ...]
    global_bytes: int
    debug_sections: tuple[str, ...]


def read_cubin(binary: bytes) -> CubinInfo:
    """Read a cubin's facts.

    Raises:
        MalformedCubinError: and nothing else, whatever the bytes are.
    """
    return _Image(binary).info()


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class _Symbol:
    index: int
    name: str
    kind: int
    other: int
    section: int


class _Image:
    """Sections and symbols of an ELF file; every read is bounds-checked."""

    def __init__(self, binary: bytes) -> None:
        self.binary = binary
        if len(binary) > MAX_CUBIN_BYTES:
            raise MalformedCubinError(f"{len(binary)} bytes, at most {MAX_CUBIN_BYTES} are allowed")
        if len(binary) < 64 or binary[:7] != b"\x7fELF\x02\x01\x01":
            raise MalformedCubinError("not a little-endian 64-bit ELF file")
        file_type, machine, _, _, programs, start, self.flags = self.unpack("<HHIQQQI", 16)
        _, program_size, program_count, size, count, names = self.unpack("<HHHHHH", 52)
        if machine != _CUDA_MACHINE or file_type != _EXECUTABLE:
            raise MalformedCubinError(f"ELF type {file_type} for machine {machine}, expected a CUDA program (2, 190)")
        layout = (binary[7], binary[8])
        if layout not in _LAYOUTS:
            raise MalformedCubinError(f"ELF OS-ABI {layout[0]:#x} version {layout[1]}: not a layout that this version knows")
        self.abi = _LAYOUTS[layout]
        if size != 64 or not 1 <= count <= MAX_SECTIONS or names >= count:
            raise MalformedCubinError(f"{count} section headers of {size} bytes, names in section {names}")
        self.check_segments(programs, program_size, program_count)
        raw = [self.unpack("<IIQQQQIIQQ", start + 64 * index) for index in range(count)]
        table = _Section("", raw[names][1], raw[names][4], raw[names][5], 0)
        self.sections = [_Section(self.text(table, r[0]), r[1], r[4], r[5], r[6]) for r in raw]
        for section in self.sections[1:]:
            if section.kind != _NOBITS and section.offset + section.size > len(binary):
                raise MalformedCubinError(f"section {section.name} reaches past the end of the file")
        self.symbols = self.read_symbols()

    def unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        if not 0 <= offset <= len(self.binary) - struct.calcsize(layout):
            raise MalformedCubinError(f"file offset {offset:#x} is outside of the file")
        return struct.unpack_from(layout, self.binary, offset)

    def check_segments(self, start: int, size: int, count: int) -> None:
        if size != 56 or not 1 <= count <= MAX_SECTIONS:
            raise MalformedCubinError(f"{count} program headers of {size} bytes")
        for index in range(count):
            _, _, offset, _, _, file_size, _, _ = self.unpack("<IIQQQQQQ", start + 56 * index)
            if offset + file_size > len(self.binary):
                raise MalformedCubinError("a segment reaches past the end of the file")

    def text(self, table: _Section, index: int) -> str:
        end = self.binary.find(b"\0", table.offset + index, table.offset + table.size)
        if not 0 <= index < table.size or end < 0:
            raise MalformedCubinError(f"string {index} is outside of its table")
        return self.binary[table.offset + index : end].decode("ascii", "backslashreplace")

    def body(self, section: _Section) -> bytes:
        return b"" if section.kind == _NOBITS else self.binary[section.offset : section.offset + section.size]

    def named(self, name: str) -> _Section | None:
        found = [section for section in self.sections if section.name == name]
        if len(found) > 1:
            raise MalformedCubinError(f"{len(found)} sections are named {name}")
        return found[0] if found else None

    def read_symbols(self) -> list[_Symbol]:
        tables = [section for section in self.sections if section.kind == _SYMTAB]
        if len(tables) != 1 or tables[0].size % 24 or tables[0].size > 24 * MAX_SYMBOLS:
            raise MalformedCubinError(f"{len(tables)} symbol tables, or one of a wrong size")
        if tables[0].link >= len(self.sections):
            raise MalformedCubinError("the symbol table names no string table")
        names = self.sections[tables[0].link]
        found = []
        for index in range(tables[0].size // 24):
            name, kind, other, section, _, _ = self.unpack("<IBBHQQ", tables[0].offset + 24 * index)
            found.append(_Symbol(index, self.text(names, name), kind & 15, other, section))
        return found

    def attributes(self, section: _Section) -> Iterator[tuple[int, int, bytes]]:
        """(format, attribute, value) of an information section."""
        body, at = self.body(section), 0
        while at < len(body):
            if at + 4 > len(body):
                raise MalformedCubinError(f"{section.name} ends inside an attribute")
            form, code, short = body[at], body[at + 1], body[at + 2 : at + 4]
            at += 4
            if form in (_NO_VALUE, _BYTE, _HALF):
                yield form, code, short
            elif form == _SIZED:
                size = int.from_bytes(short, "little")
                if at + size > len(body):
                    raise MalformedCubinError(f"{section.name}: an attribute reaches past the end")
                yield form, code, body[at : at + size]
                at += size
            else:
                raise MalformedCubinError(f"{section.name}: unknown attribute format {form}")

    def info(self) -> CubinInfo:
        for section in self.sections[1:]:
            if section.name and not section.name.startswith((*_ALLOWED_SECTIONS, *_DEBUG_SECTIONS)):
                raise MalformedCubinError(f"unknown section {section.name[:80]!r}")
        sizes = self.function_sizes()
        found = [
            symbol for symbol in self.symbols if symbol.kind == _FUNCTION and symbol.other & _ENTRY_FLAG and symbol.section
        ]
        if len(found) > MAX_ENTRIES or len({symbol.name for symbol in found}) != len(found):
            raise MalformedCubinError(f"{len(found)} kernels, or two of one name")
        arch = self.arch()
        undefined = sorted({s.name for s in self.symbols if not s.section and s.name and not s.name.startswith(".nv.")})
        globals_ = sum(s.size for s in self.sections if s.name in (".nv.global", ".nv.global.init"))
        # nvJitLink leaves an empty .nv_debug.shared where a kernel has two shared arrays (13.5): no bytes, nothing carried.
        carrying = [s for s in self.sections if s.size and s.name not in _FRAME_SECTIONS]
        debug = [s.name for s in carrying if s.name.startswith(_DEBUG_SECTIONS)]
        entries = {symbol.name: self.entry(symbol, arch, sizes) for symbol in found}
        return CubinInfo(arch, self.abi, entries, tuple(undefined), globals_, tuple(s for s in debug if s[:4] != ".rel"))

    def arch(self) -> str:
        """Capability from the header; the suffix from the header too (layout 7) or from the tool's note (layout 8)."""
        if self.abi == 7:
            return f"sm_{self.flags & 0xFF}{'a' if self.flags & 0x800 else ''}"
        capability = self.flags >> 8 & 0xFF
        note = self.named(".note.nv.tkinfo")
        said: set[str] = {str(m, "ascii") for m in _ARCH.findall(self.body(note))} if note else set()
        if len(said) != 1:
            raise MalformedCubinError(f"the assembler's note names {sorted(said) or 'no architecture'}")
        arch: str = said.pop()
        if int(arch.strip("sm_af")) != capability:
            raise MalformedCubinError(f"the header says capability {capability}, the assembler's note {arch}")
        return arch

    def function_sizes(self) -> dict[int, dict[int, int]]:
        """Registers and stack by symbol: {attribute: {symbol index: value}}."""
        sizes: dict[int, dict[int, int]] = {code: {} for code in (_REGISTERS, _FRAME_SIZE, _STACK_SIZE, _MAX_STACK_SIZE)}
        section = self.named(".nv.info")
        for form, code, value in self.attributes(section) if section else ():
            if form == _SIZED and code in sizes:
                if len(value) != 8:
                    raise MalformedCubinError(f".nv.info: attribute {code:#x} of {len(value)} bytes")
                symbol, number = struct.unpack("<II", value)
                sizes[code][symbol] = number
        return sizes

    def entry(self, symbol: _Symbol, arch: str, sizes: dict[int, dict[int, int]]) -> EntryInfo:
        section, code = self.named(f".nv.info.{symbol.name}"), self.named(f".text.{symbol.name}")
        if section is None or code is None or symbol.index not in sizes[_REGISTERS]:
            raise MalformedCubinError(f"kernel {symbol.name}: no code, no information, or no register count")
        if symbol.section >= len(self.sections) or self.sections[symbol.section] is not code:
            raise MalformedCubinError(f"kernel {symbol.name} does not lie in {code.name}")
        triples: dict[int, Triple] = {}
        parameters: dict[int, Parameter] = {}
        total = 0
        for form, attribute, value in self.attributes(section):
            if attribute in (_MAX_THREADS, _REQUIRED_BLOCK, _CLUSTER):
                triples[attribute] = _triple(symbol.name, form, value)
            elif attribute in (_PARAMETER, _PARAMETER_V2):
                ordinal, parameter = _parameter(symbol.name, attribute, form, value)
                if ordinal in parameters:
                    raise MalformedCubinError(f"kernel {symbol.name}: parameter {ordinal} is described twice")
                parameters[ordinal] = parameter
            elif attribute == _PARAMETER_BYTES:
                total = int.from_bytes(value[:2], "little")
        ordered = tuple(parameters[index] for index in sorted(parameters))
        end = max((p.offset_bytes + p.size_bytes for p in ordered), default=0)
        if sorted(parameters) != list(range(len(ordered))) or len(ordered) > MAX_PARAMETERS or end > total:
            raise MalformedCubinError(f"kernel {symbol.name}: parameters {sorted(parameters)} in a block of {total} bytes")
        block = triples.get(_REQUIRED_BLOCK)
        bound = triples.get(_MAX_THREADS, block) or (1024, 1, 1)
        stack = max(sizes[code_].get(symbol.index, 0) for code_ in (_FRAME_SIZE, _STACK_SIZE, _MAX_STACK_SIZE))
        threads = bound[0] * bound[1] * bound[2]
        shared = self.shared_bytes(symbol.name, arch)
        registers = sizes[_REGISTERS][symbol.index]
        return EntryInfo(symbol.name, registers, shared, stack, ordered, threads, block, triples.get(_CLUSTER))

    def shared_bytes(self, name: str, arch: str) -> int:
        section = self.named(f".nv.shared.{name}")
        if section is None:
            return 0
        reserved = int(arch.strip("sm_af")) >= 90 and any(symbol.name == _RESERVED_SYMBOL for symbol in self.symbols)
        return max(0, section.size - _RESERVED_SHARED_BYTES) if reserved else section.size


def _triple(name: str, form: int, value: bytes) -> Triple:
    if form != _SIZED or len(value) != 12:
        raise MalformedCubinError(f"kernel {name}: block or cluster sizes of {len(value)} bytes")
    x, y, z = struct.unpack("<III", value)
    if not all(1 <= size <= 1 << 16 for size in (x, y, z)):
        raise MalformedCubinError(f"kernel {name}: block or cluster of {(x, y, z)}")
    return x, y, z


def _parameter(name: str, attribute: int, form: int, value: bytes) -> tuple[int, Parameter]:
    if form != _SIZED or len(value) != 12:
        raise MalformedCubinError(f"kernel {name}: a parameter description of {len(value)} bytes")
    _, ordinal, offset, packed = struct.unpack("<IHHI", value)
    # The first form packs the size above alignment and space; the second, for more than 4 KiB, keeps it in the low half.
    size = packed >> 18 if attribute == _PARAMETER else packed & 0xFFFF
    return ordinal, Parameter(offset, size)
