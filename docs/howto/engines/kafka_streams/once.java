// Drops the orders that repeat one of the day before.
import java.time.Duration;
import java.time.Instant;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.processor.api.ContextualFixedKeyProcessor;
import org.apache.kafka.streams.processor.api.FixedKeyProcessorContext;
import org.apache.kafka.streams.processor.api.FixedKeyRecord;
import org.apache.kafka.streams.state.Stores;
import org.apache.kafka.streams.state.WindowStore;
import tools.jackson.databind.json.JsonMapper;import tools.jackson.databind.json.JsonMapper;

class Once {
    static final Duration DAY = Duration.ofDays(1);

    record Order(String id, String shop, long cents, Instant placed) {}

    static class First extends ContextualFixedKeyProcessor<String, Order, Order> {
        WindowStore<String, Long> seen;

        @Override
        public void init(FixedKeyProcessorContext<String, Order> context) {
            super.init(context);
            seen = context.getStateStore("seen");
        }

        @Override
        public void process(FixedKeyRecord<String, Order> order) {
            var placed = order.value().placed();
            try (var before = seen.fetch(order.key(), placed.minus(DAY).plusMillis(1), placed)) {
                if (!before.hasNext()) {
                    seen.put(order.key(), placed.toEpochMilli(), placed.toEpochMilli());
                    context().forward(order);
                }
            }
        }
    }

    static <T> Serde<T> json(Class<T> type) {
        var json = new JsonMapper();
        return Serdes.serdeFrom((topic, row) -> json.writeValueAsBytes(row), (topic, row) -> json.readValue(row, type));
    }

    static Topology topology() {
        var builder = new StreamsBuilder();
        var store = Stores.persistentWindowStore("seen", DAY.plusHours(1), DAY, false);
        builder.addStateStore(Stores.windowStoreBuilder(store, Serdes.String(), Serdes.Long()));
        builder.stream("orders", Consumed.with(Serdes.String(), json(Order.class))
                .withTimestampExtractor((record, before) -> ((Order) record.value()).placed().toEpochMilli()))
            .processValues(First::new, "seen")
            .to("orders_once", Produced.with(Serdes.String(), json(Order.class)));
        return builder.build();
    }

    public static void main(String[] args) {
        var config = new Properties();
        config.putAll(Map.of("application.id", "once", "bootstrap.servers", "broker:9092"));
        config.put("processing.guarantee", "exactly_once_v2");
        new KafkaStreams(topology(), config).start();
    }
}
