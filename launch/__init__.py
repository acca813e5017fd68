"""The commands. This file runs before any of them, whose imports take seconds: signals are watched from here on, and
--help is answered without those imports."""

import sys

from launch import stops

if sys.argv[:1] == ["-m"]:  # so it stands while Python looks for the module that it shall run
    stops.watch_imports()
    if {"--help", "-help", "-h"} & set(sys.argv[1:]):
        from launch import usage

        usage.show(sys.orig_argv[-len(sys.argv)].removeprefix("-m"))
