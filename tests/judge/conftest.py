"""Fixtures that several folders of tests share."""

from run_folders import (  # noqa: F401
    browser,
    demo,
    finished,
    finished_once,
    make_run,
    pages,
    save_model,
)
