"""Model clients: one interface over every endpoint, with retries, prices, a budget and a cache.

`make_client` makes a client from settings, `as_client` wraps the model that a workflow was given;
`Spend` counts and limits what they use. Importing this package imports no SDK.
"""

from aflow_tune.models.cache import ResponseCache as ResponseCache
from aflow_tune.models.client import ScriptedModel as ScriptedModel
from aflow_tune.models.client import as_client as as_client
from aflow_tune.models.clients import make_client as make_client
from aflow_tune.models.spend import Spend as Spend
from aflow_tune.models.spend import current_spend as current_spend
from aflow_tune.models.types import ModelClient as ModelClient
from aflow_tune.models.types import ModelError as ModelError
from aflow_tune.models.types import ModelFailure as ModelFailure
from aflow_tune.models.types import Reply as Reply
from aflow_tune.models.types import Usage as Usage
from aflow_tune.sections import ModelSettings as ModelSettings
