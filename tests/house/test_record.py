from pathlib import Path

from tests.house.record import outcomes

REPORT = """<testsuites><testsuite>
<testcase classname="tests.training.test_a" name="test_it[pp2]" time="1.26" />
<testcase classname="tests.training.test_a" name="test_it[dp2]" time="2"><failure message="no">why</failure></testcase>
<testcase classname="tests.training.test_b" name="test_that" time="0"><skipped message="no device" /></testcase>
</testsuite></testsuites>"""


def test_what_came_of_each_test_is_noted_by_file(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert outcomes(report) == {
        "tests.training.test_a": {
            "test_it[pp2]": {"outcome": "passed", "seconds": 1.3},
            "test_it[dp2]": {"outcome": "failure", "seconds": 2.0},
        },
        "tests.training.test_b": {"test_that": {"outcome": "skipped", "seconds": 0.0}},
    }
