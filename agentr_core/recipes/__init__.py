"""Recipes: one YAML file, parsed once into frozen records. One module a section; `recipe` puts them
together.
"""

from agentr_core.recipes.agent_r import CritiqueConfig, PairsConfig, SearchConfig
from agentr_core.recipes.comparison import CompareConfig
from agentr_core.recipes.data import DataConfig, GeneralDataConfig
from agentr_core.recipes.eto import DpoConfig, EtoConfig, ExpertConfig, ExploreConfig, Phase, PreferencesConfig
from agentr_core.recipes.evaluation import EvaluationConfig, EvaluationSetConfig, RevisionTestConfig
from agentr_core.recipes.execution import ErrorsConfig, ScaleConfig
from agentr_core.recipes.instances import InstancesConfig
from agentr_core.recipes.models import (
    ModelConfig,
    ModelRole,
    ModelsConfig,
    PricesConfig,
    ServerConfig,
    VllmConfig,
    url_fault,
)
from agentr_core.recipes.parsing import load, parse
from agentr_core.recipes.recipe import EnvironmentConfig, Recipe, identifying, replace, resolved, shown
from agentr_core.recipes.splicing import ContinuationConfig, SpliceConfig
from agentr_core.recipes.training import VLLM_LORA_RANKS, BaseConfig, LaunchConfig, TrainingConfig

__all__ = [
    "VLLM_LORA_RANKS",
    "BaseConfig",
    "CompareConfig",
    "ContinuationConfig",
    "CritiqueConfig",
    "DataConfig",
    "DpoConfig",
    "EnvironmentConfig",
    "ErrorsConfig",
    "EtoConfig",
    "EvaluationConfig",
    "EvaluationSetConfig",
    "ExpertConfig",
    "ExploreConfig",
    "GeneralDataConfig",
    "InstancesConfig",
    "LaunchConfig",
    "ModelConfig",
    "ModelRole",
    "ModelsConfig",
    "PairsConfig",
    "Phase",
    "PreferencesConfig",
    "PricesConfig",
    "Recipe",
    "RevisionTestConfig",
    "ScaleConfig",
    "SearchConfig",
    "ServerConfig",
    "SpliceConfig",
    "TrainingConfig",
    "VllmConfig",
    "identifying",
    "load",
    "parse",
    "replace",
    "resolved",
    "shown",
    "url_fault",
]
