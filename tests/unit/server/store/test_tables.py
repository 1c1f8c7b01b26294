from dataclasses import fields

import pytest
from sqlalchemy import Table
from tinsmith_server.store import records, tables


@pytest.mark.parametrize(
    ("table", "record"),
    [
        (tables.api_keys, records.ApiKey),
        (tables.sessions, records.Session),
        (tables.models, records.Model),
        (tables.workers, records.Worker),
        (tables.sampling_sessions, records.SamplingSession),
        (tables.checkpoints, records.Checkpoint),
    ],
    ids=lambda value: value.name if isinstance(value, Table) else "",
)
def test_every_field_of_a_record_has_its_column(table: Table, record: type[records.Worker]) -> None:
    assert {field.name for field in fields(record)} <= set(table.columns.keys())
