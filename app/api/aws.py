"""`/v1/hooks/aws`: what EventBridge tells about EC2 instances, by way of SNS.

Invariant: a message acts once, and only if SNS signed it and its topic is one of those in the settings: whoever has
an AWS account can have SNS sign something.
"""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.api import sns
from app.api.deps import Services, ServicesDep
from app.protocol.errors import BadInput, Forbidden, Unavailable

router = APIRouter(prefix="/v1/hooks", tags=["hooks"])


@router.post("/aws", status_code=202)
async def aws(request: Request, svc: ServicesDep) -> Response:
    """Take an SNS message: confirm a subscription, or act on an interruption or rebalance notice."""
    topics = svc.core.settings.aws_topic_arns
    if not topics:
        raise Unavailable("this service takes no SNS messages: ECHO2_AWS_TOPIC_ARNS is not set")
    message = sns.parse(await request.body())
    await svc.sns.verify(message, datetime.fromtimestamp(svc.core.clock(), UTC))
    if message.TopicArn not in topics:
        raise Forbidden("the topic of this message is not one of ECHO2_AWS_TOPIC_ARNS")
    if message.Type == "SubscriptionConfirmation":
        await svc.sns.confirm(message)
        return JSONResponse({"accepted": True, "replay": False, "confirmed": True}, 202)
    if message.Type == "UnsubscribeConfirmation":
        return JSONResponse({"accepted": True, "replay": False}, 202)
    return await _notification(svc, message)


async def _notification(svc: Services, message: sns.Message) -> Response:
    try:
        notice = svc.read_aws_event(message.Message)
    except ValueError as error:
        raise BadInput(f"Message is not an event of EventBridge: {error}") from error
    taken = await svc.notices.take(notice, f"sns:{message.MessageId}")
    return JSONResponse({"accepted": True, "replay": taken == "replay", "acted": taken == "acted"}, 202)
