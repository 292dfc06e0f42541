from .module import FedHPro as FedHPro
