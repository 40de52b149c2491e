"""How a restore reads: each choice and its reason."""

from __future__ import annotations

import pytest
from test_policies_compat import manifest as any_manifest
from test_policies_floor import GB, RATES

from policies import reading
from policies.manifest import MappedFile
from policies.reading import Restore

SLOW_DISK = RATES.model_copy(update={"disk": 0.4 * GB, "disk_cached": 0.7 * GB})


def mapped(size: int, touched: int | None) -> MappedFile:
    return MappedFile(path=f"/model-{size}", bytes=size, sha256="0", touched=touched)


def test_cold_memory_is_read_past_the_page_cache_where_that_was_faster() -> None:
    assert reading.direct(Restore(), RATES).on
    assert not reading.direct(Restore(), SLOW_DISK).on
    assert reading.direct(Restore(), SLOW_DISK).why == "0.40 GB/s past the page cache, 0.70 GB/s through it"
    # Through it each byte takes fresh memory twice, which a little more speed is not worth.
    assert reading.direct(Restore(), SLOW_DISK.model_copy(update={"disk_cached": 0.5 * GB})).on
    assert reading.direct(Restore(), None).on
    assert reading.direct(Restore(read="direct"), SLOW_DISK).on
    assert not reading.direct(Restore(read="cached"), RATES).on


def test_clones_that_are_restored_at_once_share_what_they_read() -> None:
    assert not reading.direct(Restore(), RATES, alone=False).on
    assert "another replica" in reading.choices(Restore(), any_manifest(), RATES, alone=False)[0]
    assert reading.direct(Restore(read="direct"), RATES, alone=False).on


def test_huge_pages_are_used_where_they_were_faster() -> None:
    assert not reading.huge(RATES).on
    assert reading.huge(RATES.model_copy(update={"fill_huge": 5.0 * GB})).on
    assert not reading.huge(RATES.model_copy(update={"fill_huge": 1.2 * RATES.fill})).on
    assert reading.huge(None).on


@pytest.mark.parametrize(
    ("settings", "files", "chosen", "why"),
    [
        (Restore(), [mapped(GB, GB)], [GB], "touched 100% of the big files"),
        (Restore(), [mapped(GB, GB // 10)], [], "touched 10% of the big files"),
        (Restore(), [mapped(GB, None)], [], "it was not rehearsed"),
        (Restore(), [mapped(1 << 20, 1 << 20)], [], "no big file is mapped"),
        (Restore(prefetch="on"), [mapped(GB, None), mapped(1 << 20, None)], [GB], "restore.prefetch is on"),
        (Restore(prefetch="off"), [mapped(GB, GB)], [], "restore.prefetch is off"),
    ],
)
def test_files_are_read_ahead_if_a_rehearsal_needed_them(
    settings: Restore, files: list[MappedFile], chosen: list[int], why: str
) -> None:
    found, said = reading.ahead(settings, files)
    assert [file.bytes for file in found] == chosen
    assert why in said


def test_criu_finds_heads_of_mapped_files_and_small_ones_whole() -> None:
    MB = 1 << 20
    files = [mapped(GB, GB), mapped(40 * MB, 0), mapped(30 * MB, None), mapped(20 * MB, MB), mapped(4096, None)]
    asked = reading.first(Restore(), files)
    heads, whole = asked[: len(files)], asked[len(files) :]
    assert [size for _, size in heads] == [64 << 10] * 4 + [4096]
    # The smallest, as long as they are less than a big file in all.
    assert whole == (("/model-4096", 4096), (f"/model-{20 * MB}", 20 * MB), (f"/model-{30 * MB}", 30 * MB))
    assert reading.first(Restore(prefetch="off"), files) == ()
    assert reading.first(Restore(), []) == ()


def test_restore_case_53_lazy_pages_are_not_used_and_that_is_said() -> None:
    assert any("no page is left for later" in line for line in reading.choices(Restore(), any_manifest(), RATES))
