from .module import GraphPFN as GraphPFN
