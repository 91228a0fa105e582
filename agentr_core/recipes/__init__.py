"""Recipes: one YAML file, parsed once into frozen records. There is one module per section;
`recipe` puts them together.
"""

from agentr_core.recipes.agent_r import AgentRConfig, CritiqueConfig, Learning, PairsConfig, SearchConfig
from agentr_core.recipes.comparison import CompareConfig
from agentr_core.recipes.curriculum import CurriculumConfig
from agentr_core.recipes.data import DataConfig, GeneralDataConfig
from agentr_core.recipes.environments import EnvironmentConfig, WorldConfig
from agentr_core.recipes.et_agent import Calibration, EtAgentConfig, FlywheelConfig, RftConfig
from agentr_core.recipes.eto import (
    DpoConfig,
    EtoConfig,
    ExpertConfig,
    ExploreConfig,
    Phase,
    PreferencesConfig,
    ThoughtsConfig,
)
from agentr_core.recipes.evaluation import EvaluationConfig, EvaluationSetConfig, RevisionTestConfig
from agentr_core.recipes.execution import ErrorsConfig, ScaleConfig
from agentr_core.recipes.grpo import GrpoConfig
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
from agentr_core.recipes.parsing import load, parse, restored
from agentr_core.recipes.recipe import FieldValue, Recipe, field_values, identifying, replace, resolved, shown
from agentr_core.recipes.sampling import DrawingConfig
from agentr_core.recipes.splicing import ContinuationConfig, SpliceConfig
from agentr_core.recipes.training import VLLM_LORA_RANKS, LaunchConfig, TrainingConfig

__all__ = [
    "VLLM_LORA_RANKS",
    "AgentRConfig",
    "Calibration",
    "CompareConfig",
    "ContinuationConfig",
    "CritiqueConfig",
    "CurriculumConfig",
    "DataConfig",
    "DpoConfig",
    "DrawingConfig",
    "EnvironmentConfig",
    "ErrorsConfig",
    "EtAgentConfig",
    "EtoConfig",
    "EvaluationConfig",
    "EvaluationSetConfig",
    "ExpertConfig",
    "ExploreConfig",
    "FieldValue",
    "FlywheelConfig",
    "GeneralDataConfig",
    "GrpoConfig",
    "InstancesConfig",
    "LaunchConfig",
    "Learning",
    "ModelConfig",
    "ModelRole",
    "ModelsConfig",
    "PairsConfig",
    "Phase",
    "PreferencesConfig",
    "PricesConfig",
    "Recipe",
    "RevisionTestConfig",
    "RftConfig",
    "ScaleConfig",
    "SearchConfig",
    "ServerConfig",
    "SpliceConfig",
    "ThoughtsConfig",
    "TrainingConfig",
    "VllmConfig",
    "WorldConfig",
    "field_values",
    "identifying",
    "load",
    "parse",
    "replace",
    "resolved",
    "restored",
    "shown",
    "url_fault",
]
