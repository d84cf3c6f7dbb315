"""Asks the instance metadata service of AWS (IMDSv2) for interruptions of spot instances and rebalance advice.

Every question carries a session token, which is asked for by PUT and lasts for hours; one that is refused is asked for
anew, once. Status 404 says that there is no notice. The service without tokens (IMDSv1) is not spoken to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.preemption._metadata_request import INTERVAL, Answer, ask, parse_object, parse_time
from phalanx.preemption._notice import Notice, SourceProblem

ENDPOINT = "http://169.254.169.254"
TOKEN_SECONDS = 21600
INTERRUPTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@dataclass(kw_only=True)
class AwsNotices:
    """A spot instance that will be interrupted (two minutes ahead) or, with ``rebalance``, is likely to be."""

    endpoint: str = ENDPOINT
    rebalance: bool = True
    interval: float = INTERVAL
    name: str = "aws"
    _token: str = field(default="", init=False, repr=False)

    def look(self, now: float) -> Notice | None:
        answer = self._ask(INTERRUPTION)
        if answer.status != 404:
            found = parse_object(answer.expect_ok(INTERRUPTION), INTERRUPTION)
            action = found.get("action")
            if not isinstance(action, str):
                raise SourceProblem(f"{INTERRUPTION} said {answer.text[:80]!r}; expected an action")
            return Notice(source=self.name, reason=f"AWS will {action} this instance", at=parse_time(found.get("time")))
        if not self.rebalance:
            return None
        answer = self._ask(REBALANCE)
        if answer.status == 404:
            return None
        found = parse_object(answer.expect_ok(REBALANCE), REBALANCE)
        if parse_time(found.get("noticeTime")) is None:
            raise SourceProblem(f"{REBALANCE} said {answer.text[:80]!r}; expected a noticeTime")
        return Notice(source=self.name, reason="AWS recommends to rebalance: this instance is likely to be interrupted")

    def _ask(self, path: str) -> Answer:
        answer = self._ask_with_token(path)
        if answer.status == 401:  # it has expired
            self._token = ""
            answer = self._ask_with_token(path)
        return answer

    def _ask_with_token(self, path: str) -> Answer:
        if not self._token:
            asked = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            answer = ask(f"{self.endpoint}/latest/api/token", method="PUT", headers=asked)
            token = answer.expect_ok("AWS's token service")
            if not token or not token.isascii() or not token.isprintable():
                raise SourceProblem(f"AWS's token service said {token[:80]!r}, which is no token")
            self._token = token
        return ask(f"{self.endpoint}{path}", headers={"X-aws-ec2-metadata-token": self._token})
