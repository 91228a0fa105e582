"""A hash of the state of a simulated world, computed within the simulator.

A call to Java takes a hundredth of the time of a step, and the simulator's own tree of objects
(`getObjectTree`) half of it, without doors and stages of life. So a description is composed of
Java's method handles once in a process, and each state then takes a single call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

# Type descriptors, as in Java's class files.
_TEXT, _ANY, _OPTION = "Ljava/lang/String;", "Ljava/lang/Object;", "Lscala/Option;"
_SET, _STREAM, _COLLECTION = "Lscala/collection/immutable/Set;", "Ljava/util/stream/Stream;", "Ljava/util/Collection;"
_OBJECT = "Lscienceworld/struct/EnvObject;"
_AGENT, _TERMINAL = "Lscienceworld/objects/agent/Agent;", "Lscienceworld/objects/electricalcomponent/Terminal;"
_EPISODE = "Lscienceworld/runtime/AgentInterface;"
_TASK, _GOALS = "Lscienceworld/tasks/Task;", "Lscienceworld/tasks/goals/GoalSequence;"
_FOCUS = "Lscienceworld/tasks/goals/ObjMonitor;"
_UUID = "Ljava/util/UUID;"
_KEYS, _VALUES = "Lscala/collection/mutable/Set;", "Lscala/collection/mutable/Map;"
_MATERIAL, _DEVICE, _CONTAINER, _PORTAL, _WIRES = (
    f"Lscienceworld/properties/{name}Properties;"
    for name in ("Material", "Device", "Container", "Portal", "ElectricalConnection")
)


def state_hasher(gateway: Any, interface: Any) -> Callable[[], str]:
    """Return a function that returns a hash of the present state of a simulator's episode: the
    goals, the object in focus, all objects with what contains them, and the temperatures in the
    agent's room. `interface` is the simulator's `PythonInterface`.
    """
    java = _Handles(gateway)
    goals = java.chain(java.method(_EPISODE, "task", _TASK), java.method(_TASK, "goalSequence", _GOALS))
    parts = (
        java.chain(goals, java.method(_GOALS, "curSubgoalIdx", "I"), java.to_text("I")),
        java.chain(goals, java.method(_GOALS, "failed", "Z"), java.to_text("Z")),
        java.chain(
            goals,
            java.method(_GOALS, "optionalUnorderedSubgoalsCompleted", "[Z"),
            java.function("java.util.Arrays", "toString", f"([Z){_TEXT}"),
        ),
        java.chain(goals, java.method(_GOALS, "completedKeys", _KEYS), java.to_text(_KEYS)),
        java.chain(goals, java.method(_GOALS, "storedValues", _VALUES), java.to_text(_VALUES)),
        java.chain(java.method(_EPISODE, "objMonitor", _FOCUS), java.to_text(_FOCUS)),
        java.chain(java.method(_EPISODE, "universe", _OBJECT), _object_description(java)),
        java.chain(
            java.method(_EPISODE, "agent", _AGENT),
            java.method(_AGENT, "getContainer", _OPTION),
            java.unwrap(_OBJECT),
            _object_description(java, with_temperatures=True),
        ),
    )
    digest = java.chain(
        java.method("Lscienceworld/runtime/pythonapi/PythonInterface;", "agentInterface", _OPTION),
        java.unwrap(_EPISODE),
        java.join(_EPISODE, parts),
        # A hash, since a text of more than 8,192 characters would be sent in two parts, the second
        # after 40 ms.
        java.method(_TEXT, "getBytes", "[B"),
        java.function("java.util.UUID", "nameUUIDFromBytes", f"([B){_UUID}"),
        java.to_text(_UUID),
    ).bindTo(interface)
    no_arguments = gateway.jvm.java.util.Collections.emptyList()
    return lambda: str(digest.invokeWithArguments(no_arguments))


def _object_description(java: _Handles, *, with_temperatures: bool = False) -> Any:
    """Return a handle that describes an object and all that it contains, in an order that does not
    matter; with `with_temperatures`, also their temperatures.
    """
    # The description is recursive, so it refers to a call site whose target is set at the end.
    site = java.call_site(f"({_OBJECT}){_TEXT}")
    description = site.dynamicInvoker()

    def property_of(descriptor: str, text: Any, *, owner: str = _OBJECT) -> Any:
        name = f"prop{descriptor.rpartition('/')[2].removesuffix('Properties;')}"
        return java.optional(java.method(owner, name, _OPTION), java.chain(java.unwrap(descriptor), text))

    def flag(descriptor: str, name: str) -> Any:
        return java.chain(java.method(descriptor, name, "Z"), java.to_text("Z"))

    def members(name: str, include_hidden: bool) -> Any:
        return java.chain(
            java.bind(java.method(_OBJECT, name, _SET, "Z"), include_hidden), java.join_sorted(description)
        )

    def terminal(name: str) -> Any:
        wires = property_of(_WIRES, java.method(_WIRES, "toJSON", _TEXT), owner=_TERMINAL)
        return java.optional(java.method(_OBJECT, name, _OPTION), java.chain(java.unwrap(_TERMINAL), wires))

    phase = java.method(_MATERIAL, "stateOfMatter", _TEXT)
    # The air of each room cools from the start.
    is_gas = java.chain(phase, java.bind(java.method(_TEXT, "equals", "Z", _ANY), "gas"))
    # In steps of ten degrees with bounds at five: things begin at ten, and approach the temperature
    # of their room.
    temperature = java.chain(
        java.method(_MATERIAL, "temperatureC", "D"),
        java.function("java.lang.Math", "round", "(D)J"),
        java.bind(java.function("java.lang.Long", "sum", "(JJ)J"), 5),
        java.bind(java.function("java.lang.Math", "floorDiv", "(JJ)J"), 10),
        java.to_text("J"),
    )
    is_connected = java.method(_OBJECT, "isElectricallyConnected", "Z")
    # The terminals of most objects are hidden, so that they are not among the contained objects.
    terminals = java.join(_OBJECT, (terminal("terminal1"), terminal("terminal2")))
    parts = (
        # The name includes whether the object burns or is burnt, and its stage of life.
        java.bind(java.method(_OBJECT, "getDescriptName", _TEXT, _TEXT), ""),
        property_of(_MATERIAL, java.if_else(is_gas, phase, temperature) if with_temperatures else phase),
        property_of(_DEVICE, flag(_DEVICE, "isActivated")),
        property_of(_CONTAINER, flag(_CONTAINER, "isOpen")),
        property_of(_PORTAL, flag(_PORTAL, "isOpen")),
        property_of(_WIRES, java.method(_WIRES, "toJSON", _TEXT)),
        java.if_else(is_connected, terminals, java.chain(is_connected, java.to_text("Z"))),
        members("getContainedObjects", False),
        members("getPortals", True),
    )
    site.setTarget(java.join(_OBJECT, parts))
    return description


class _Handles:
    """A factory for method handles in a Java process."""

    def __init__(self, gateway: Any) -> None:
        java = gateway.jvm.java
        handles = java.lang.invoke.MethodHandles
        # Each access to a class calls Java, so members that are used often are looked up once.
        lookup = handles.publicLookup()
        self._find_virtual, self._find_static = lookup.findVirtual, lookup.findStatic
        self._filter, self._insert = handles.filterReturnValue, handles.insertArguments
        self._collect, self._permute, self._guard = (
            handles.collectArguments,
            handles.permuteArguments,
            handles.guardWithTest,
        )
        self._type = java.lang.invoke.MethodType.fromMethodDescriptorString
        self._loader = java.lang.ClassLoader.getSystemClassLoader()
        self._class = java.lang.Class.forName
        self._make_call_site = java.lang.invoke.MutableCallSite
        self._proxy = java.lang.invoke.MethodHandleProxies.asInterfaceInstance
        self._joining_collector = java.util.stream.Collectors.joining
        self._bound_value = gateway.new_array(java.lang.Object, 1)
        # Indices that pass the one argument of a joined handle to both of its parts.
        self._zeros = gateway.new_array(gateway.jvm.int, 2)

    def call_site(self, descriptor: str) -> Any:
        """Return a mutable call site for a method type."""
        return self._make_call_site(self._type(descriptor, self._loader))

    def method(self, descriptor: str, name: str, result: str, argument: str = "") -> Any:
        """Return a handle for an instance method of a class."""
        owner = self._class(descriptor[1:-1].replace("/", "."))
        return self._find_virtual(owner, name, self._type(f"({argument}){result}", self._loader))

    def function(self, owner: str, name: str, descriptor: str) -> Any:
        """Return a handle for a static method of a class."""
        return self._find_static(self._class(owner), name, self._type(descriptor, self._loader))

    def to_text(self, descriptor: str) -> Any:
        """Return a handle that converts a value of a type to text."""
        is_object = descriptor.startswith("L")
        handle = self.function("java.lang.String", "valueOf", f"({_ANY if is_object else descriptor}){_TEXT}")
        return self._cast(handle, f"({descriptor}){_TEXT}") if is_object else handle

    def unwrap(self, descriptor: str) -> Any:
        """Return a handle that takes the value out of a Scala option, cast to a class."""
        return self._cast(self.method(_OPTION, "get", _ANY), f"({_OPTION}){descriptor}")

    def chain(self, *handles: Any) -> Any:
        """Return a handle that passes the result of each handle to the next one."""
        return reduce(self._filter, handles)

    def bind(self, handle: Any, value: Any) -> Any:
        """Return the handle with its second argument bound to a value."""
        self._bound_value[0] = value
        return self._insert(handle, 1, self._bound_value)

    def optional(self, option: Any, text: Any) -> Any:
        """Return a handle that applies `text` to the value of an option, or converts the option
        itself to text if it is empty.
        """
        is_defined = self.chain(option, self.method(_OPTION, "isDefined", "Z"))
        return self.if_else(is_defined, self.chain(option, text), self.chain(option, self.to_text(_OPTION)))

    def if_else(self, test: Any, handle: Any, otherwise: Any) -> Any:
        """Return a handle that calls `handle` if the test holds, else `otherwise`."""
        return self._guard(test, handle, otherwise)

    def join(self, descriptor: str, parts: Sequence[Any]) -> Any:
        """Return a handle that joins several texts about one object with spaces."""
        concat = self.method(_TEXT, "concat", _TEXT, _TEXT)
        append_space, joined_type = self.bind(concat, " "), self._type(f"({descriptor}){_TEXT}", self._loader)

        def join_two(first: Any, second: Any) -> Any:
            join_handle = self._collect(concat, 0, self.chain(first, append_space))
            pair = self._collect(join_handle, 1, second)
            return self._permute(pair, joined_type, self._zeros)

        return reduce(join_two, parts)

    def join_sorted(self, description: Any) -> Any:
        """Return a handle that joins the descriptions of all members of a set, sorted."""
        owner = "scala.collection.JavaConverters"
        collection = self.function(owner, "asJavaCollection", f"(Lscala/collection/Iterable;){_COLLECTION}")
        map_method = self.method(_STREAM, "map", _STREAM, "Ljava/util/function/Function;")
        collect_method = self.method(_STREAM, "collect", _ANY, "Ljava/util/stream/Collector;")
        return self.chain(
            self._cast(collection, f"({_SET}){_COLLECTION}"),
            self.method(_COLLECTION, "stream", _STREAM),
            self.bind(map_method, self._proxy(self._class("java.util.function.Function"), description)),
            self.method(_STREAM, "sorted", _STREAM),
            self._cast(self.bind(collect_method, self._joining_collector(", ", "[", "]")), f"({_STREAM}){_TEXT}"),
        )

    def _cast(self, handle: Any, descriptor: str) -> Any:
        return handle.asType(self._type(descriptor, self._loader))
