from .losses import consistency_objective as consistency_objective
from .losses import foresight_composite_objective as foresight_composite_objective
from .module import FocalPolicy as FocalPolicy
from .network import ConditionalUnet1d as ConditionalUnet1d
from .policy import PolicyConfig as PolicyConfig
from .policy import PolicyNetwork as PolicyNetwork
from .rollout import RolloutPolicy as RolloutPolicy
from .sampler import flow_times as flow_times
