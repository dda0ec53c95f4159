"""Puts ``record.schema.json``, the JSON Schema of a record, into the wheel as it is built."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SchemaHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the schema, and let the builder take it; an editable installation needs none."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from ptdbench.records import schema

        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "record.schema.json")
        path.write_bytes(schema.json_schema())
        build_data["force_include"][str(path)] = "ptdbench/record.schema.json"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was written."""
        if version != "editable":
            self._folder.cleanup()
