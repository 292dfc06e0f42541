from .federated import FederatedImages as FederatedImages
from .graph_prior import GraphPrior as GraphPrior
from .images import ImageClassification as ImageClassification
from .nodes import NodeClassification as NodeClassification
from .robots import RobotDemonstrations as RobotDemonstrations
from .speech import SpeechText as SpeechText
from .videos import ExpertVideos as ExpertVideos
