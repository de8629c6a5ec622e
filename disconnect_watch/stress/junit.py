"""A report as JUnit XML, which CI systems show: a test case for each check."""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from disconnect_watch.stress.report import Report

__all__ = ["as_junit"]


def as_junit(report: Report) -> str:
    """The document."""
    failures = sum(not check.holds for check in report.checks)
    suite = Element(
        "testsuite",
        name=f"disconnect-watch stress {report.target}",
        tests=str(len(report.checks)),
        failures=str(failures),
        errors="0",
        time=f"{report.seconds:.3f}",
    )
    properties = SubElement(suite, "properties")
    SubElement(properties, "property", name="seed", value=str(report.seed))
    for check in report.checks:
        case = SubElement(suite, "testcase", classname="disconnect_watch.stress", name=check.name)
        if not check.holds:
            SubElement(case, "failure", message=check.detail)
    SubElement(suite, "system-out").text = report.as_text()
    indent(suite)
    return tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
