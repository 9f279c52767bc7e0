from __future__ import annotations

from datetime import timedelta

from ostler.policy.retention import RetentionPolicy

DAY = timedelta(days=1)
POLICY = RetentionPolicy()


def test_by_default_the_audit_is_kept_for_ever() -> None:
    assert (POLICY.finished, POLICY.events, POLICY.idempotency) == (DAY, 30 * DAY, DAY)
    assert POLICY.audit is None
    assert POLICY.batch == 500


def test_a_policy_is_checked_and_goes_to_json_and_back() -> None:
    assert POLICY.validate()
    assert RetentionPolicy.from_json(POLICY.to_json()) == POLICY
    assert RetentionPolicy.from_dict({"finished": "36h", "audit": "400d"}) == RetentionPolicy(
        finished=1.5 * DAY, audit=400 * DAY
    )
    bad = RetentionPolicy(finished=timedelta(0), events=4000 * DAY, audit=timedelta(0), batch=0)
    assert [fault.field for fault in bad.validate()] == ["finished", "events", "audit", "batch"]
    assert bad.validate().errors[0] == "finished must be 1 min to 3650 d, was 0 s"
