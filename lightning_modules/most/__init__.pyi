from .language_model import load_language_model as load_language_model
from .language_model import upcycle as upcycle
from .module import MoST as MoST
from .moe import make_modality_aware as make_modality_aware
