from pathlib import Path

from cluster.machine_facts import cache_bytes, cpu_model, machine_facts


def test_cpu_model_is_the_kernels_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 7\nmodel name\t: Some CPU: 2 GHz\nflags\t: fma\n")
    assert cpu_model(cpuinfo) == "Some CPU: 2 GHz"
    assert cpu_model(tmp_path / "absent") == ""


def test_caches_without_those_of_instructions(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [
            ("1", "Data", "48K"),
            ("1", "Instruction", "64K"),
            ("2", "Unified", "2048K"),
            ("3", "Unified", "491520K"),
        ]
    ):
        directory = tmp_path / f"index{index}"
        directory.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (directory / name).write_text(text + "\n")
    assert cache_bytes(tmp_path) == {"L1d": 49_152, "L2": 2_097_152, "L3": 503_316_480}
    assert cache_bytes(tmp_path / "absent") == {}


def test_this_machine_has_a_core_and_memory() -> None:
    facts = machine_facts()
    assert 1 <= facts["cores"] <= facts["cores_of_machine"]
    assert facts["memory_bytes"] > 0
    assert facts["system"].startswith("Linux ")
